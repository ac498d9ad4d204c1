//! Waiting for several futures of one task.

use std::future::Future;
use std::pin::pin;
use std::task::Poll;

/// Whichever is done first: `Ok` for the first future, `Err` for the second. Both done: the first. The other one is
/// dropped.
pub async fn first_of<A, B>(first: impl Future<Output = A>, second: impl Future<Output = B>) -> Result<A, B> {
    let mut first = pin!(first);
    let mut second = pin!(second);
    std::future::poll_fn(move |cx| {
        if let Poll::Ready(value) = first.as_mut().poll(cx) {
            return Poll::Ready(Ok(value));
        }
        second.as_mut().poll(cx).map(Err)
    })
    .await
}

/// Runs all futures at once; their values, in their order.
pub async fn all<F: Future + Unpin>(mut futures: Vec<F>) -> Vec<F::Output> {
    let mut values: Vec<Option<F::Output>> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(move |cx| {
        for (future, value) in futures.iter_mut().zip(&mut values).filter(|(_, value)| value.is_none()) {
            if let Poll::Ready(done) = pin!(future).poll(cx) {
                *value = Some(done);
            }
        }
        match values.iter().all(Option::is_some) {
            true => Poll::Ready(values.iter_mut().filter_map(Option::take).collect()),
            false => Poll::Pending,
        }
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rt::{self, sim};
    use std::time::Duration;

    #[test]
    fn the_first_one_done_wins_and_the_first_of_two() {
        sim::run(1, async {
            let sleep = |ms| rt::sleep(Duration::from_millis(ms));
            assert_eq!(first_of(sleep(2), sleep(1)).await, Err(()));
            assert_eq!(first_of(sleep(1), sleep(2)).await, Ok(()));
            assert_eq!(first_of(async { 1 }, async { 2 }).await, Ok(1));
        });
    }

    #[test]
    fn all_run_at_once_and_come_back_in_order() {
        sim::run(1, async {
            let started = rt::now();
            let task = |ms: u64| async move {
                rt::sleep(Duration::from_millis(ms)).await;
                ms
            };
            let tasks: Vec<_> = [3, 1, 2].into_iter().map(|ms| Box::pin(task(ms))).collect();
            assert_eq!(all(tasks).await, [3, 1, 2]);
            assert_eq!(rt::now() - started, Duration::from_millis(3));
            assert_eq!(all(Vec::<std::future::Ready<u8>>::new()).await, []);
        });
    }
}
