//! One raw value of one layer, and how it becomes a typed one.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde_json::Value;

use super::{units, CpuSet, ListenAddress};

/// A value as its layer holds it. The file has JSON types; environment and flags have text.
#[derive(Clone, Copy, Debug)]
pub enum Raw<'a> {
    Json(&'a Value),
    Text(&'a str),
}

impl fmt::Display for Raw<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Raw::Json(value) => write!(f, "{value}"),
            Raw::Text(text) => write!(f, "{text:?}"),
        }
    }
}

impl Raw<'_> {
    pub fn text(self) -> Result<String, String> {
        match self {
            Raw::Json(Value::String(text)) => Ok(text.clone()),
            Raw::Json(other) => Err(format!("{other} is not a string")),
            Raw::Text(text) => Ok(text.to_owned()),
        }
    }

    /// A file's path, not empty.
    pub fn path(self) -> Result<std::path::PathBuf, String> {
        match self.text()? {
            text if text.is_empty() => Err("must not be empty: leave it out instead".to_owned()),
            text => Ok(text.into()),
        }
    }

    /// A whole number of that range; both bounds belong to it.
    pub fn whole<T: TryFrom<u64>>(self, range: RangeInclusive<u64>) -> Result<T, String> {
        let number = match self {
            Raw::Json(value) => value.as_u64(),
            Raw::Text(text) => text.parse().ok(),
        };
        let inside = number.filter(|number| range.contains(number)).and_then(|number| T::try_from(number).ok());
        inside.ok_or_else(|| format!("{self} is not a whole number from {} to {}", range.start(), range.end()))
    }

    /// The same where 0 stands for something else, which `zero` names.
    pub fn whole_or_zero(self, zero: &str, range: RangeInclusive<u64>) -> Result<u64, String> {
        self.whole(0..=u64::MAX).ok().filter(|number| *number == 0 || range.contains(number)).ok_or_else(|| {
            format!("{self} is neither 0 ({zero}) nor a whole number from {} to {}", range.start(), range.end())
        })
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
