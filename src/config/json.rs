//! The JSON of the configuration file. A key that is given twice is refused: of two values one would win in silence,
//! and which one is nothing that an operator should have to know.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

/// One JSON text. An error names the key's path, such as `http.addr`, and the place.
pub fn parse(text: &str) -> Result<Value, String> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let value = At(String::new()).deserialize(&mut deserializer);
    value.and_then(|value| deserializer.end().map(|()| value)).map_err(|error| format!("json: {error}"))
}

/// Reads the value at this path.
struct At(String);

impl At {
    fn key(&self, key: &str) -> At {
        match self.0.is_empty() {
            true => At(key.to_owned()),
            false => At(format!("{}.{key}", self.0)),
        }
    }
}

impl<'de> DeserializeSeed<'de> for At {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for At {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Value, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element_seed(At(format!("{}[{}]", self.0, list.len())))? {
            list.push(item);
        }
        Ok(Value::Array(list))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Value, A::Error> {
        let mut object = Map::new();
        while let Some(key) = fields.next_key::<String>()? {
            let at = self.key(&key);
            if object.contains_key(&key) {
                return Err(A::Error::custom(format!("{} is given twice: keep one of the two", at.0)));
            }
            object.insert(key, fields.next_value_seed(at)?);
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_the_text() {
        let text = r#"{"a":{"b":[1,-2,1.5,true,null,"x\n"],"c":{}},"d":[{"e":18446744073709551615}]}"#;
        assert_eq!(parse(text).unwrap(), serde_json::from_str::<Value>(text).unwrap());
        for wrong in ["", "{", "{} x", "[1,]", "{\"a\":1,}", "nul"] {
            assert!(parse(wrong).unwrap_err().starts_with("json: "), "{wrong}");
        }
        assert!(parse(&"[".repeat(100_000)).unwrap_err().contains("recursion limit"));
    }

    #[test]
    fn a_key_given_twice_is_named_by_its_path() {
        for (text, path) in [
            (r#"{"http":{},"log":{},"http":{}}"#, "http"),
            (r#"{"http":{"addr":":1","addr":":1"}}"#, "http.addr"),
            (r#"{"http":{"addr":":1","\u0061ddr":":2"}}"#, "http.addr"),
            (r#"{"a":[0,{"b":{"c":1,"c":2}}]}"#, "a[1].b.c"),
        ] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with(&format!("json: {path} is given twice")), "{error}");
        }
        parse(r#"{"a":{"b":1},"c":{"b":1},"B":1,"b":1}"#).unwrap();
    }
}
