//! Leased records on their way to a client.

use std::rc::Rc;

use super::shard_queues::ShardQueues;
use crate::api::Delivery;
use crate::peer::Take;

/// Deliveries that go back to their partitions at once if nobody takes them: whoever waits for them may be dropped
/// at any await (C15, C40, lesson N37).
pub(super) struct Held {
    queues: Rc<ShardQueues>,
    deliveries: Vec<Delivery>,
    bytes: usize,
}

impl Held {
    pub fn new(queues: Rc<ShardQueues>) -> Held {
        Held { queues, deliveries: Vec::new(), bytes: 0 }
    }

    pub fn push(&mut self, delivery: Delivery) {
        self.bytes += delivery.body.len();
        self.deliveries.push(delivery);
    }

    pub fn extend(&mut self, deliveries: impl IntoIterator<Item = Delivery>) {
        deliveries.into_iter().for_each(|delivery| self.push(delivery));
    }

    pub fn is_empty(&self) -> bool {
        self.deliveries.is_empty()
    }

    pub fn len(&self) -> usize {
        self.deliveries.len()
    }

    /// What is left of `take`; `None` when it is used up. The record that crosses the byte bound still counts (C90).
    pub fn rest_of(&self, take: Take) -> Option<Take> {
        let max = (take.max as usize).checked_sub(self.deliveries.len()).filter(|left| *left > 0)?;
        let bytes_max = take.bytes_max.saturating_sub(self.bytes);
        let open = self.deliveries.is_empty() || bytes_max > 0;
        open.then_some(Take { max: max as u32, bytes_max })
    }

    /// The deliveries, now in the hands of the caller.
    pub fn into_deliveries(mut self) -> Vec<Delivery> {
        std::mem::take(&mut self.deliveries)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if !self.deliveries.is_empty() {
            self.queues.release(std::mem::take(&mut self.deliveries));
        }
    }
}
