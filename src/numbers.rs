//! Numbers as people read them in tables: thousands separated, three or four digits that mean something. Files hold
//! plain numbers instead.

pub const DASH: &str = "–";

/// 1091.2 -> `1,091`, 49.43 -> `49.4`, 0.3129 -> `0.313`, 0 -> `0`.
pub fn number(value: f64) -> String {
    if !value.is_finite() {
        return if value.is_nan() { DASH.to_string() } else { "inf".to_string() };
    }
    let magnitude = value.abs();
    let decimals = match magnitude {
        m if m == 0.0 || m >= 99.95 => 0,
        m if m >= 9.995 => 1,
        m if m >= 0.9995 => 2,
        _ => 3,
    };
    grouped(&format!("{value:.decimals$}"))
}

pub fn optional(value: Option<f64>) -> String {
    value.map_or_else(|| DASH.to_string(), number)
}

/// 0.853 -> `85 %`.
pub fn percent(fraction: Option<f64>) -> String {
    match fraction {
        Some(fraction) if fraction.is_finite() => {
            format!("{} %", grouped(&format!("{:.0}", fraction * 100.0)))
        }
        _ => DASH.to_string(),
    }
}

/// 22.08 -> `22x`, 1.64 -> `1.64x`.
pub fn ratio(value: Option<f64>) -> String {
    match value {
        Some(value) if value.is_finite() => format!("{}x", number(value)),
        _ => DASH.to_string(),
    }
}

/// 8411502592 -> `8.41 GB` (powers of ten, as memory bandwidth is quoted).
pub fn bytes(value: f64) -> String {
    for (scale, unit) in [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")] {
        if value >= scale {
            return format!("{} {unit}", number(value / scale));
        }
    }
    format!("{value:.0} B")
}

/// 75 -> `75 s`, 400 -> `7 min`, 8000 -> `2.2 h`.
pub fn duration(seconds: f64) -> String {
    match seconds {
        s if s < 0.9995 => format!("{} ms", number(s * 1e3)),
        s if s < 120.0 => format!("{s:.0} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// Commas between groups of three digits before the point.
pub fn grouped(plain: &str) -> String {
    let (sign, digits) = plain.strip_prefix('-').map_or(("", plain), |digits| ("-", digits));
    let (whole, rest) = digits.find('.').map_or((digits, ""), |point| digits.split_at(point));
    let mut text = String::new();
    for (index, digit) in whole.chars().enumerate() {
        if index > 0 && (whole.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    format!("{sign}{text}{rest}")
}

/// The median, as every quoted figure is one over repeats.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let mut sorted: Vec<f64> = values.into_iter().collect();
    sorted.sort_by(f64::total_cmp);
    crate::measure::quantile::quantile(&sorted, 0.5)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits_that_mean_something() {
        for (value, text) in [
            (1091.2, "1,091"),
            (120678.0, "120,678"),
            (99.96, "100"),
            (49.43, "49.4"),
            (9.999, "10.0"),
            (1.5, "1.50"),
            (0.3129, "0.313"),
            (0.0, "0"),
            (-1234567.0, "-1,234,567"),
        ] {
            assert_eq!(number(value), text);
        }
        assert_eq!(number(f64::INFINITY), "inf");
    }

    #[test]
    fn units() {
        assert_eq!(bytes(8_411_502_592.0), "8.41 GB");
        assert_eq!(percent(Some(0.853)), "85 %");
        assert_eq!(percent(None), DASH);
        assert_eq!(ratio(Some(22.08)), "22.1x");
        assert_eq!(duration(75.0), "75 s");
    }
}
