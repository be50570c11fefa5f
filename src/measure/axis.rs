//! A value on the swept axis: a number where it reads as one, else a word (`inf`, `split`).

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AxisValue(String);

impl AxisValue {
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Finite number, where it is one.
    pub fn number(&self) -> Option<f64> {
        self.0.parse::<f64>().ok().filter(|number| number.is_finite())
    }
}

impl<T: Into<String>> From<T> for AxisValue {
    fn from(text: T) -> Self {
        let text: String = text.into();
        Self(text.trim().to_string())
    }
}

impl fmt::Display for AxisValue {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl Serialize for AxisValue {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if let Ok(whole) = self.0.parse::<i64>() {
            serializer.serialize_i64(whole)
        } else if let Some(number) = self.number() {
            serializer.serialize_f64(number)
        } else {
            serializer.serialize_str(&self.0)
        }
    }
}

impl<'de> Deserialize<'de> for AxisValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;
        impl de::Visitor<'_> for Visitor {
            type Value = AxisValue;
            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a number, a word or true or false")
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<AxisValue, E> {
                Ok(text.into())
            }
            fn visit_bool<E: de::Error>(self, value: bool) -> Result<AxisValue, E> {
                Ok(value.to_string().into())
            }
            fn visit_i64<E: de::Error>(self, value: i64) -> Result<AxisValue, E> {
                Ok(value.to_string().into())
            }
            fn visit_u64<E: de::Error>(self, value: u64) -> Result<AxisValue, E> {
                Ok(value.to_string().into())
            }
            fn visit_f64<E: de::Error>(self, value: f64) -> Result<AxisValue, E> {
                Ok(value.to_string().into())
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_plain_and_words_are_words() {
        let values: Vec<AxisValue> = ["256", "0.5", "inf", "split", "true"].map(AxisValue::from).to_vec();
        let json = serde_json::to_string(&values).unwrap();
        assert_eq!(json, r#"[256,0.5,"inf","split","true"]"#);
        assert_eq!(serde_json::from_str::<Vec<AxisValue>>(&json).unwrap(), values);
    }
}
