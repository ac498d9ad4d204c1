//! What an operator should know although it does not stop the node.

use std::fmt;

/// Cause, and what to do about it. Displays as one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    pub cause: String,
    pub remedy: String,
}

impl Warning {
    pub fn new(cause: impl Into<String>, remedy: impl Into<String>) -> Warning {
        Warning { cause: cause.into(), remedy: remedy.into() }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.cause, self.remedy)
    }
}
