//! What the reader of TOML says of a file, in the words of someone who writes one.

use super::knobs;

/// The name that serde would have taken which is closest to the one it did not: its message lists them all.
pub fn nearest_expected(message: &str) -> Option<String> {
    let (found, expected) = message.split_once(", expected")?;
    let quoted =
        |text: &str| -> Vec<String> { text.split('`').skip(1).step_by(2).map(str::to_string).collect() };
    let found = quoted(found).pop().filter(|_| message.starts_with("unknown "))?;
    knobs::nearest(&found, quoted(expected).iter().map(String::as_str)).map(str::to_string)
}

/// The message on one line, with what a key must be instead of the name of a type.
pub fn in_words(message: &str) -> String {
    let message = message.replace('\n', " ");
    let mut words: Vec<String> = Vec::new();
    let mut parts = message.split(' ');
    while let Some(part) = parts.next() {
        let (word, comma) = part.strip_suffix(',').map_or((part, ""), |word| (word, ","));
        words.push(match word {
            // (Its name follows.)
            "struct" => format!(
                "a table{}",
                if parts.next().is_some_and(|name| name.ends_with(',')) { "," } else { "" }
            ),
            "map" => format!("a table{comma}"),
            "sequence" => format!("list{comma}"),
            _ => part.to_string(),
        });
    }
    words.join(" ").replace("a a table", "a table")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_said_in_words() {
        assert_eq!(
            in_words("invalid type: integer `3`, expected struct ExperimentSpec"),
            "invalid type: integer `3`, expected a table"
        );
        assert_eq!(
            in_words("invalid type: map, expected a sequence"),
            "invalid type: a table, expected a list"
        );
    }
}
