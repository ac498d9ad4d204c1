//! The terminal: taken over for a page that is drawn again and again, and given back whatever happens.

use std::io::{self, Write};
use std::time::Duration;

use crossterm::event::{self, Event, KeyCode, KeyModifiers};
use crossterm::{cursor, execute, terminal};

use super::page::{Line, Style};

pub enum Key {
    Quit,
    Sort,
}

/// Raw mode and the alternate screen, until dropped.
pub struct Screen {
    colours: bool,
}

impl Screen {
    pub fn open() -> io::Result<Screen> {
        terminal::enable_raw_mode()?;
        // From here on the drop gives back what was taken, also if the next step fails.
        let screen = Screen { colours: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) };
        execute!(io::stdout(), terminal::EnterAlternateScreen, cursor::Hide)?;
        Ok(screen)
    }

    /// Columns and rows.
    pub fn size(&self) -> (usize, usize) {
        let (columns, rows) = terminal::size().unwrap_or((80, 24));
        (usize::from(columns), usize::from(rows))
    }

    pub fn draw(&mut self, lines: &[Line]) -> io::Result<()> {
        let (columns, rows) = self.size();
        let mut frame = String::from("\x1b[H");
        for (index, line) in lines.iter().take(rows).enumerate() {
            let style = match line.style {
                Style::Plain => "",
                Style::Heading => "\x1b[7m",
                Style::Limit if self.colours => "\x1b[1;33m",
                Style::Trouble if self.colours => "\x1b[1;31m",
                Style::Total | Style::Limit | Style::Trouble => "\x1b[1m",
            };
            let text: String = line.text.chars().take(columns).collect();
            let start = if index == 0 { "" } else { "\r\n" };
            frame.push_str(&format!("{start}{style}{text}\x1b[0m\x1b[K"));
        }
        frame.push_str("\x1b[J");
        let mut out = io::stdout();
        out.write_all(frame.as_bytes())?;
        out.flush()
    }

    /// Waits for a key, at most that long.
    pub fn key(&mut self, wait: Duration) -> io::Result<Option<Key>> {
        if !event::poll(wait)? {
            return Ok(None);
        }
        let Event::Key(key) = event::read()? else { return Ok(None) };
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        Ok(match key.code {
            KeyCode::Char('q' | 'Q') | KeyCode::Esc => Some(Key::Quit),
            KeyCode::Char('c') if control => Some(Key::Quit),
            KeyCode::Char('s') => Some(Key::Sort),
            _ => None,
        })
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        // A terminal that is gone needs nothing back.
        let _ = execute!(io::stdout(), cursor::Show, terminal::LeaveAlternateScreen);
        let _ = terminal::disable_raw_mode();
    }
}
