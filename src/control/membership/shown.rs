//! Who gets the answer to a change of topics may use any node next: a client goes round all of them. So the node that
//! answers waits until the others show the change too, as far as they are alive and quick. Otherwise a produce right
//! after a create would be told that there is no such topic, and one right after a delete and a create under the same
//! name would be taken for the former topic and discarded with it.

use std::sync::Arc;
use std::time::Duration;

use narad_shards::rt;
use narad_shards::wire::{operation, status, Incoming, Outgoing};

use super::{refusal, Answer, Membership};
use crate::control::wire;

/// A slower node is not waited for: until it has caught up, clients that ask it are told of no such topic, or of the former
/// one. E52 promises the answering node alone.
const OTHERS_WAIT: Duration = Duration::from_millis(250);

impl Membership {
    /// Resolves when every living member shows the effects of the entry at `index`, or after [`OTHERS_WAIT`].
    pub async fn wait_shown_elsewhere(&self, index: u64) {
        let others: Vec<Arc<str>> = {
            let state = self.applier.state();
            let others =
                state.members().values().filter(|member| member.alive && *member.node() != self.settings.me.node);
            others.map(|member| member.registration.peer_address.clone()).collect()
        };
        let asked = others.into_iter().map(|address| {
            Box::pin(async move {
                // Whatever it answers, and an older one does not know the question: nothing depends on it.
                let to = (self.settings.resolve)(&address).await?;
                self.transport.call(to, wire::shown_request(index, OTHERS_WAIT)).await.ok()
            })
        });
        let _ = rt::timeout(OTHERS_WAIT, rt::all(asked.collect())).await;
    }

    /// Answers another node once this one shows what was decided up to an index.
    pub(super) async fn answer_shown(&self, request: &Incoming) -> Outgoing {
        let answer = match wire::read_shown(request) {
            None => refusal(status::BAD_REQUEST, "bad_request", "unreadable index"),
            Some(index) => match rt::timeout(OTHERS_WAIT, self.applier.wait_shown(index)).await {
                Ok(Ok(())) => Answer { status: status::OK, ..Answer::default() },
                Ok(Err(stopped)) => refusal(status::UNAVAILABLE, "unavailable", &stopped.why),
                Err(rt::Elapsed) => refusal(status::UNAVAILABLE, "unavailable", "not shown here yet"),
            },
        };
        wire::answer(operation::SHOWN, &answer)
    }
}
