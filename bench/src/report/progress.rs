//! What is going on, on a terminal; nothing in a pipe or a file.

use std::io::{IsTerminal, Write};

/// Shows one line on the standard error output, which the next one replaces. Gone when dropped.
pub struct Progress {
    terminal: bool,
}

impl Progress {
    /// Shows nothing yet.
    pub fn new() -> Progress {
        Progress { terminal: std::io::stderr().is_terminal() }
    }

    /// Replaces the line.
    pub fn show(&self, text: &str) {
        if self.terminal {
            // The terminal may go away; progress is not worth an error.
            let _ = write!(std::io::stderr(), "\r\x1b[K{text}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.show("");
    }
}
