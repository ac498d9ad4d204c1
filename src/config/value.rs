//! One raw value of one layer, and how it becomes a typed one.

use std::time::Duration;

use serde_json::Value;

use super::{units, CpuSet, ListenAddress};

/// A value as its layer holds it. The file has JSON types; environment and flags have text.
#[derive(Clone, Copy, Debug)]
pub enum Raw<'a> {
    Json(&'a Value),
    Text(&'a str),
}

impl Raw<'_> {
    pub fn text(self) -> Result<String, String> {
        match self {
            Raw::Json(Value::String(text)) => Ok(text.clone()),
            Raw::Json(other) => Err(format!("{other} is not a string")),
            Raw::Text(text) => Ok(text.to_owned()),
        }
    }

    pub fn integer(self) -> Result<u64, String> {
        match self {
            Raw::Json(value) => value.as_u64().ok_or_else(|| format!("{value} is not a whole number from 0 up")),
            Raw::Text(text) => text.parse().map_err(|_| format!("{text:?} is not a whole number from 0 up")),
        }
    }

    pub fn integer_u32(self) -> Result<u32, String> {
        let number = self.integer()?;
        u32::try_from(number).map_err(|_| format!("{number} is above {}", u32::MAX))
    }

    pub fn boolean(self) -> Result<bool, String> {
        match self {
            Raw::Json(Value::Bool(value)) => Ok(*value),
            Raw::Json(other) => Err(format!("{other} is neither true nor false")),
            Raw::Text("true" | "TRUE" | "True" | "t" | "T" | "1") => Ok(true),
            Raw::Text("false" | "FALSE" | "False" | "f" | "F" | "0") => Ok(false),
            Raw::Text(other) => Err(format!("{other:?} is neither true nor false")),
        }
    }

    pub fn duration(self) -> Result<Duration, String> {
        match self {
            Raw::Json(Value::Number(number)) => {
                Err(format!("{number} has no unit: write it as a string, \"{number}s\" or \"{number}ms\""))
            }
            _ => units::parse_duration(&self.text()?),
        }
    }

    pub fn bytes(self) -> Result<u64, String> {
        match self {
            Raw::Json(Value::Number(number)) => {
                Err(format!("{number} has no unit: write it as a string, such as \"2GiB\""))
            }
            _ => units::parse_bytes(&self.text()?),
        }
    }

    pub fn cpus(self) -> Result<CpuSet, String> {
        match CpuSet::parse(&self.text()?)? {
            set if set.is_empty() => Err("names no CPU".to_owned()),
            set => Ok(set),
        }
    }

    pub fn address(self) -> Result<ListenAddress, String> {
        ListenAddress::parse(&self.text()?)
    }

    /// One of a few words.
    pub fn choice<T: Copy>(self, choices: &[(&str, T)]) -> Result<T, String> {
        let text = self.text()?;
        choices.iter().find(|(name, _)| *name == text).map(|(_, value)| *value).ok_or_else(|| {
            let names: Vec<String> = choices.iter().map(|(name, _)| format!("\"{name}\"")).collect();
            format!("{text:?} is none of {}", names.join(", "))
        })
    }
}
