//! Strict JSON in, compact JSON out.
//!
//! serde_json parses; what it says is put into the API's words here. Values that are only passed on are never built.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::Deserialize;

use super::reply::ApiError;

/// Marks an error text that is the whole answer, without `invalid json: ` in front.
const VERBATIM: char = '\u{0}';

/// Refuses with exactly `text`, out of the middle of a parse.
pub(crate) fn refuse<E: Error>(text: impl fmt::Display) -> E {
    E::custom(format_args!("{VERBATIM}{text}"))
}

pub(crate) fn unknown_field<E: Error>(name: &str) -> E {
    E::custom(format_args!("json: unknown field {name:?}"))
}

/// Parses `text` as exactly one object. Whatever follows it is refused after its first character (lesson N42).
pub(crate) fn parse<'de, T: Fields<'de>>(text: &'de [u8]) -> Result<T, ApiError> {
    // Checked once for all of it, so that strings and raw values need no check of their own.
    let text = std::str::from_utf8(text).map_err(|_| ApiError::bad_request("invalid json: not UTF-8"))?;
    let mut parser = serde_json::Deserializer::from_str(text);
    let value = Object::new().deserialize(&mut parser).map_err(|cause| refusal(&cause))?;
    parser.end().map_err(|_| ApiError::bad_request("invalid json: more than one value in the body"))?;
    Ok(value)
}

fn refusal(cause: &serde_json::Error) -> ApiError {
    let text = cause.to_string();
    let place = format!(" at line {} column {}", cause.line(), cause.column());
    let text = text.strip_suffix(&place).unwrap_or(&text);
    match text.strip_prefix(VERBATIM) {
        Some(verbatim) => ApiError::bad_request(verbatim.to_owned()),
        None => ApiError::bad_request(format!("invalid json: {text}")),
    }
}

/// What an object of the API holds, filled in member by member; a member given twice counts as given last.
pub(crate) trait Fields<'de>: Default {
    /// Takes the value of the member `name` from the map, or refuses the name with [`unknown_field`].
    fn member<A: MapAccess<'de>>(&mut self, name: &str, map: &mut A) -> Result<(), A::Error>;
}

/// Expects an object of type `T`.
pub(crate) struct Object<T>(PhantomData<T>);

impl<T> Object<T> {
    pub fn new() -> Object<T> {
        Object(PhantomData)
    }
}

impl<'de, T: Fields<'de>> DeserializeSeed<'de> for Object<T> {
    type Value = T;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<T, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de, T: Fields<'de>> Visitor<'de> for Object<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<T, A::Error> {
        let mut fields = T::default();
        while let Some(Name(name)) = map.next_key()? {
            fields.member(&name, &mut map)?;
        }
        Ok(fields)
    }
}

/// A string that is borrowed from the text unless it holds escapes.
#[derive(Deserialize)]
#[serde(transparent)]
pub(crate) struct Name<'a>(#[serde(borrow)] pub Cow<'a, str>);

/// An array of at most `max` elements, refused with `too_many` at the first character of the one that is over,
/// whatever follows it.
pub(crate) struct Bounded<T> {
    pub max: usize,
    pub too_many: &'static str,
    element: PhantomData<T>,
}

impl<T> Bounded<T> {
    pub fn new(max: usize, too_many: &'static str) -> Bounded<T> {
        Bounded { max, too_many, element: PhantomData }
    }
}

/// Makes the seed that reads one element of a [`Bounded`] array.
pub(crate) trait Element<'de>: Sized {
    fn read<A: SeqAccess<'de>>(elements: &mut A) -> Result<Option<Self>, A::Error>;
}

impl<'de, T: Element<'de>> DeserializeSeed<'de> for Bounded<T> {
    type Value = Vec<T>;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        // An option, so that `null` counts as an absent array.
        deserializer.deserialize_option(self)
    }
}

impl<'de, T: Element<'de>> Visitor<'de> for Bounded<T> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array")
    }

    fn visit_none<E: Error>(self) -> Result<Vec<T>, E> {
        Ok(Vec::new())
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Vec<T>, D::Error> {
        deserializer.deserialize_seq(self)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut elements: A) -> Result<Vec<T>, A::Error> {
        let mut taken = Vec::new();
        while taken.len() < self.max {
            match T::read(&mut elements)? {
                Some(element) => taken.push(element),
                None => return Ok(taken),
            }
        }
        match elements.next_element_seed(OneTooMany(self.too_many))? {
            Some(never) => match never {},
            None => Ok(taken),
        }
    }
}

/// Refuses an element before any of it is parsed.
struct OneTooMany(&'static str);

impl<'de> DeserializeSeed<'de> for OneTooMany {
    type Value = Infallible;
    fn deserialize<D: Deserializer<'de>>(self, _deserializer: D) -> Result<Infallible, D::Error> {
        Err(refuse(self.0))
    }
}

/// Whether `text` is one JSON text, in time linear in its length and without building it. Nesting is not bounded.
pub(crate) fn is_json(text: &str) -> bool {
    let start = text.trim_ascii_start().as_bytes().first();
    let plausible =
        start.is_some_and(|byte| matches!(byte, b'{' | b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f' | b'n'));
    plausible && serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// Whether a JSON text nests at most `levels` arrays and objects.
pub(crate) fn nests_within(text: &str, levels: usize) -> bool {
    if text.len() <= 2 * levels {
        return true; // each level takes two characters
    }
    let (mut depth, mut in_string, mut escaped) = (0usize, false, false);
    for byte in text.bytes() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = in_string,
            b'"' => in_string = !in_string,
            _ if in_string => {}
            b'[' | b'{' => depth += 1,
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth > levels {
            return false;
        }
    }
    true
}

/// Appends `text` as a JSON string.
pub(crate) fn write_string(out: &mut Vec<u8>, text: &str) {
    serde_json::to_writer(out, text).expect("writing a string into memory cannot fail");
}

/// Appends `"name":` with a comma in front, unless an object has just been opened.
pub(crate) fn write_name(out: &mut Vec<u8>, name: &str) {
    if out.last() != Some(&b'{') {
        out.push(b',');
    }
    out.push(b'"');
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":");
}

/// Appends a decimal number.
pub(crate) fn write_number(out: &mut Vec<u8>, number: u64) {
    serde_json::to_writer(out, &number).expect("writing a number into memory cannot fail");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_texts_are_told_from_other_texts() {
        for (text, valid) in [
            ("{}", true),
            (" [1, 2]\n", true),
            ("\"a\\u00e9\"", true),
            ("-1.5e300000000", true),
            ("null", true),
            ("true", true),
            ("", false),
            (" ", false),
            ("\u{feff}{}", false),
            ("{} {}", false),
            ("{\"a\":1,}", false),
            ("[1 2]", false),
            ("\"a\nb\"", false),
            ("01", false),
            ("1.", false),
            ("nul", false),
            ("truex", false),
            ("hello", false),
            ("'a'", false),
            ("NaN", false),
            ("\u{b}1", false),
        ] {
            assert_eq!(is_json(text), valid, "{text:?}");
        }
    }

    #[test]
    fn nesting_is_counted_outside_of_strings() {
        let nested = |levels: usize| "[".repeat(levels) + &"]".repeat(levels);
        assert!(nests_within(&nested(9), 9) && !nests_within(&nested(10), 9));
        assert!(nests_within(r#"["[[[[[[[[[[[[[[[[[[[[[[[[[[\\\"[[[[[[[[",{"a":"]"},[1],[2],[3]]"#, 2));
        assert!(!nests_within(r#"[{"a\\":[[1]],"b":"long enough to be looked at"}]"#, 3));
    }

    #[test]
    fn n81_a_million_brackets_cost_neither_stack_nor_time() {
        let open = "[".repeat(500_000);
        assert!(!is_json(&open));
        let closed = open + &"]".repeat(500_000);
        assert!(is_json(&closed));
    }
}
