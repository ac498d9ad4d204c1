//! How far a graceful stop of one listener is, and which requests it waits for.

use std::cell::Cell;

use narad_shards::rt::sync::{Notified, Notify};

#[derive(Default)]
pub(crate) struct Stop {
    draining: Cell<bool>,
    closing: Cell<bool>,
    /// Handlers at work, by whether they began in the drain.
    underway: [Cell<u32>; 2],
    /// The last of those that began before the drain has ended.
    finished: Notify,
    close: Notify,
}

impl Stop {
    /// Every answer is the last one on its connection from now on.
    pub fn is_draining(&self) -> bool {
        self.draining.get()
    }

    /// No more connections come: an idle one waits for nothing.
    pub fn is_closing(&self) -> bool {
        self.closing.get()
    }

    /// A handler begins; it ends with the drop.
    pub fn begin(&self) -> Underway<'_> {
        let underway = Underway { stop: self, in_drain: self.draining.get() };
        underway.count().set(underway.count().get() + 1);
        underway
    }

    /// Begins the drain. Resolves when everything that had begun before has ended; what comes in the meantime is not
    /// waited for, or clients that connect again and again would hold a stop up for ever.
    pub async fn drain(&self) {
        self.draining.set(true);
        loop {
            let finished = self.finished.notified();
            if self.underway[0].get() == 0 {
                return;
            }
            finished.await;
        }
    }

    pub fn close(&self) {
        self.draining.set(true);
        self.closing.set(true);
        self.close.notify_all();
    }

    /// Resolves when [`Stop::close`] is called. That sets the flag before it wakes anybody.
    pub fn closes(&self) -> Notified {
        self.close.notified()
    }
}

pub(crate) struct Underway<'s> {
    stop: &'s Stop,
    in_drain: bool,
}

impl Underway<'_> {
    fn count(&self) -> &Cell<u32> {
        &self.stop.underway[usize::from(self.in_drain)]
    }
}

impl Drop for Underway<'_> {
    fn drop(&mut self) {
        let left = self.count().get() - 1;
        self.count().set(left);
        if left == 0 && self.stop.draining.get() && !self.in_drain {
            self.stop.finished.notify_all();
        }
    }
}
