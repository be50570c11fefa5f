//! JSON: an array of the same objects that CSV has as rows.

use serde::Serialize;

use crate::{Error, Result};

/// The items as an array of objects.
///
/// # Errors
/// A fault of the program alone.
pub fn array<T: Serialize>(items: &[T]) -> Result<String> {
    let text = serde_json::to_string_pretty(items)
        .map_err(|error| Error::bug(format!("cannot write JSON: {error}")))?;
    Ok(text + "\n")
}
