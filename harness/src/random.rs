//! A small seedable generator, so that a run can be repeated as far as the machine allows.

pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Uniform enough in `low..high`.
    pub fn range(&mut self, low: u64, high: u64) -> u64 {
        low + self.draw() % (high - low).max(1)
    }
}
