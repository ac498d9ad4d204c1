//! Why a node does not start.

use std::fmt;

/// Cause and remedy, one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub(super) cause: String,
    pub(super) remedy: String,
    of_a_setting: bool,
}

impl Refusal {
    pub fn new(cause: impl Into<String>, remedy: impl Into<String>) -> Refusal {
        Refusal { cause: cause.into(), remedy: remedy.into(), of_a_setting: false }
    }

    /// A setting that contradicts the machine; `cause` names its key.
    pub fn setting(cause: impl Into<String>, remedy: impl Into<String>) -> Refusal {
        Refusal { of_a_setting: true, ..Refusal::new(cause, remedy) }
    }

    /// The line for standard error.
    pub fn line(&self) -> String {
        match self.of_a_setting {
            true => format!("narad: config: {self}"),
            false => format!("narad: cannot start: {self}"),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.cause, self.remedy)
    }
}

impl std::error::Error for Refusal {}
