//! Rings between shards.

mod bell;

pub use bell::Doorbell;
