//! What a run has done, for a look at whether it was worth running.

/// How much a run has exercised: an empty run proves nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Counts {
    pub accepted: u64,
    pub refused: u64,
    pub unknown: u64,
    pub delivered: u64,
    pub acked: u64,
    pub acks_undone: u64,
    pub duplicates: u64,
    pub excused: u64,
    pub ends: u64,
    /// Of whole nodes: terms with a leader, and old files that came back.
    pub terms: u64,
    pub old_files: u64,
}

impl Counts {
    pub fn add(&mut self, other: &Counts) {
        self.accepted += other.accepted;
        self.refused += other.refused;
        self.unknown += other.unknown;
        self.delivered += other.delivered;
        self.acked += other.acked;
        self.acks_undone += other.acks_undone;
        self.duplicates += other.duplicates;
        self.excused += other.excused;
        self.ends += other.ends;
        self.terms += other.terms;
        self.old_files += other.old_files;
    }

    /// What many runs together must have shown, and did not.
    pub fn missing(&self, whole: bool) -> Option<&'static str> {
        [
            (self.accepted, "nothing was accepted"),
            (self.delivered, "nothing was delivered"),
            (self.acked, "nothing was acked"),
            (self.ends, "no process ever ended"),
            (if whole { self.terms } else { 1 }, "nobody ever led"),
            (if whole { self.old_files } else { 1 }, "no old file ever came back"),
        ]
        .into_iter()
        .find(|(count, _)| *count == 0)
        .map(|(_, text)| text)
    }
}
