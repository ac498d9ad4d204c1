//! What became of a group, for everybody whose records lie in it.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::AppendError;

enum State {
    Pending(Vec<Waker>),
    Known(Result<(), AppendError>),
}

/// One per group, shared by its callers: no allocation per append.
pub(crate) struct Outcome(RefCell<State>);

impl Outcome {
    pub fn pending() -> Rc<Outcome> {
        Rc::new(Outcome(RefCell::new(State::Pending(Vec::new()))))
    }

    /// Sets the outcome, once, and wakes everybody.
    pub fn resolve(&self, result: Result<(), AppendError>) {
        let before = std::mem::replace(&mut *self.0.borrow_mut(), State::Known(result));
        match before {
            State::Pending(wakers) => wakers.into_iter().for_each(Waker::wake),
            State::Known(_) => unreachable!("a group has one outcome"),
        }
    }

    pub fn is_ok(&self) -> bool {
        matches!(&*self.0.borrow(), State::Known(Ok(())))
    }

    pub fn wait(self: &Rc<Outcome>) -> Wait {
        Wait { outcome: self.clone(), place: None }
    }
}

pub(crate) struct Wait {
    outcome: Rc<Outcome>,
    /// Index of this waiter's waker.
    place: Option<usize>,
}

impl Future for Wait {
    type Output = Result<(), AppendError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let outcome = self.outcome.clone();
        let mut state = outcome.0.borrow_mut();
        match &mut *state {
            State::Known(result) => Poll::Ready(result.clone()),
            State::Pending(wakers) => {
                match self.place {
                    Some(place) => wakers[place].clone_from(cx.waker()),
                    None => {
                        self.place = Some(wakers.len());
                        wakers.push(cx.waker().clone());
                    }
                }
                Poll::Pending
            }
        }
    }
}
