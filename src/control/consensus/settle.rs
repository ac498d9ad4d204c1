//! The safety rule, in one place: entries, hard state and snapshot are durable before any message leaves; then what is
//! committed is applied; then the library moves on. Whoever cannot make them durable never gets to send.

use std::sync::Arc;

use raft::eraftpb::{Entry, Message};
use raft::ReadState;

use super::core::Core;
use super::disk::Changes;
use crate::control::Stopped;

/// What the rule is about. The driver has real ones.
pub trait Hands {
    /// `Ok`: durable. `Err` is final.
    async fn store(&mut self, changes: Arc<Changes>) -> Result<(), Stopped>;
    /// Puts the snapshot that was received, of this index, in the place of the state.
    async fn install(&mut self, core: &Core, index: u64) -> Result<(), Stopped>;
    fn send(&mut self, core: &Core, messages: Vec<Message>);
    fn may_read(&mut self, states: Vec<ReadState>);
    /// Entries are handed to the state machine, in order.
    async fn apply(&mut self, core: &mut Core, entries: Vec<Entry>) -> Result<(), Stopped>;
}

/// Works off all that is ready. After `Err` the core must not be used any more.
pub async fn settle(core: &mut Core, hands: &mut impl Hands) -> Result<(), Stopped> {
    while core.has_ready() {
        let mut ready = core.ready();
        let changes = Arc::new(core.changes(&ready));
        if !changes.is_empty() {
            hands.store(changes.clone()).await?;
            core.stored(&changes);
        }
        if let Some(start) = changes.start {
            hands.install(core, start.index).await?;
        }
        let mut messages = ready.take_messages();
        messages.extend(ready.take_persisted_messages());
        hands.send(core, messages);
        hands.may_read(ready.take_read_states());
        let committed = ready.take_committed_entries();
        hands.apply(core, committed).await?;
        let mut light = core.advance(ready);
        hands.send(core, light.take_messages());
        hands.apply(core, light.take_committed_entries()).await?;
        core.advance_apply();
    }
    Ok(())
}
