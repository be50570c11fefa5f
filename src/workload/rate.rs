//! A request rate: requests a second, or `inf` (everything at once).
//!
//! Files hold plain numbers, and neither JSON nor TOML agree on infinity, so it is written as the string `inf`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use crate::Error;

/// Requests a second, above 0; may be infinite.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Rate(f64);

impl Rate {
    pub const FLOOD: Self = Self(f64::INFINITY);

    /// # Errors
    /// [`Error::Invalid`] unless `per_s` is above 0 (infinity is allowed).
    pub fn new(per_s: f64) -> Result<Self, Error> {
        if per_s > 0.0 {
            Ok(Self(per_s))
        } else {
            Err(Error::invalid(
                format!("request rate {per_s} is out of bounds"),
                "a rate is a number of requests a second above 0, or inf",
            ))
        }
    }

    pub fn per_s(self) -> f64 {
        self.0
    }

    /// `None` for a flood.
    pub fn finite(self) -> Option<f64> {
        self.0.is_finite().then_some(self.0)
    }

    pub fn is_flood(self) -> bool {
        self.0.is_infinite()
    }
}

/// A number as short as it can be written: very large and very small ones with an exponent, since all
/// digits of 1e300 would be no name of an arm.
pub fn written(value: f64) -> String {
    let size = value.abs();
    if value != 0.0 && !(1e-6..1e16).contains(&size) { format!("{value:e}") } else { value.to_string() }
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&written(self.0))
    }
}

impl FromStr for Rate {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        let per_s = text.trim().parse().map_err(|_| {
            Error::invalid(format!("`{text}` is not a request rate"), "give requests a second, or inf")
        })?;
        Self::new(per_s)
    }
}

impl Serialize for Rate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.finite() {
            Some(per_s) => serializer.serialize_f64(per_s),
            None => serializer.serialize_str("inf"),
        }
    }
}

impl<'de> Deserialize<'de> for Rate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = Rate;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("requests a second above 0, or \"inf\"")
            }
            fn visit_f64<E: de::Error>(self, per_s: f64) -> Result<Rate, E> {
                Rate::new(per_s).map_err(E::custom)
            }
            fn visit_u64<E: de::Error>(self, per_s: u64) -> Result<Rate, E> {
                self.visit_f64(per_s as f64)
            }
            fn visit_i64<E: de::Error>(self, per_s: i64) -> Result<Rate, E> {
                self.visit_f64(per_s as f64)
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<Rate, E> {
                text.parse().map_err(E::custom)
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinity_is_the_string_inf_and_reads_back() {
        let json = serde_json::to_string(&[Rate::FLOOD, Rate::new(2.5).unwrap()]).unwrap();
        assert_eq!(json, r#"["inf",2.5]"#);
        assert_eq!(serde_json::from_str::<[Rate; 2]>(&json).unwrap()[0], Rate::FLOOD);
        assert!(Rate::new(0.0).is_err() && Rate::new(f64::NAN).is_err() && "fast".parse::<Rate>().is_err());
    }
}
