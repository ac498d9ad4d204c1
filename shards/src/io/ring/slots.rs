//! The table of operations in flight. A slot owns what its operation points to until the completion has come,
//! whether anybody still waits for it or not (lesson U7).

use std::ffi::CString;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

use super::udp::Message;
use super::Descriptor;
use crate::io::{AlignedBuf, Slice};

/// Which bound an operation counts against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Class {
    /// Ends by itself within the time of a disk.
    File,
    /// May wait for another host for ever.
    Socket,
}

/// What one operation points to. Moving a `Keep` does not move what the kernel reads or writes.
pub(crate) struct Keep {
    pub memory: Memory,
    /// Stays open until the completion.
    _descriptor: Option<Rc<Descriptor>>,
    /// The completion's result is a new descriptor, to be closed when nobody takes it.
    yields_descriptor: bool,
}

pub(crate) enum Memory {
    Nothing,
    Buf(AlignedBuf),
    Bytes(Vec<u8>),
    Message(Box<Message>),
    Statx(Box<libc::statx>),
    Slice { _data: Slice },
    Paths { _names: [CString; 2] },
}

impl Keep {
    pub const NOTHING: Keep = Keep { memory: Memory::Nothing, _descriptor: None, yields_descriptor: false };

    /// An operation on an open descriptor.
    pub fn on(descriptor: &Rc<Descriptor>, memory: Memory) -> Keep {
        Keep { memory, _descriptor: Some(descriptor.clone()), yields_descriptor: false }
    }

    pub fn accept(listener: &Rc<Descriptor>) -> Keep {
        Keep { memory: Memory::Nothing, _descriptor: Some(listener.clone()), yields_descriptor: true }
    }

    pub fn open(name: CString) -> Keep {
        Keep { yields_descriptor: true, ..Keep::path(name) }
    }

    pub fn path(name: CString) -> Keep {
        Keep::paths(name, CString::default())
    }

    pub fn paths(name: CString, other: CString) -> Keep {
        Keep { memory: Memory::Paths { _names: [name, other] }, ..Keep::NOTHING }
    }
}

/// What the kernel said, and the memory it is done with.
pub(crate) struct Completion {
    pub result: i32,
    pub flags: u32,
    pub keep: Keep,
}

/// A completion that nobody waits for.
pub(crate) struct Garbage {
    pub result: i32,
    pub flags: u32,
    pub yields_descriptor: bool,
    _keep: Keep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpId {
    index: u32,
    generation: u32,
}

impl OpId {
    pub fn user_data(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }
}

enum State {
    Free,
    /// Nobody is woken for the `expected` result.
    InFlight {
        waker: Option<Waker>,
        expected: Option<i32>,
    },
    Abandoned,
    Done {
        result: i32,
        flags: u32,
    },
}

struct Slot {
    generation: u32,
    class: Class,
    state: State,
    keep: Keep,
}

#[derive(Default)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

pub(super) struct Done {
    pub class: Class,
    pub waker: Option<Waker>,
    pub garbage: Option<Garbage>,
}

impl Slots {
    pub fn insert(&mut self, class: Class, keep: Keep) -> OpId {
        let index = match self.free.pop() {
            Some(index) => index,
            None => {
                self.slots.push(Slot { generation: 0, class, state: State::Free, keep: Keep::NOTHING });
                (self.slots.len() - 1) as u32
            }
        };
        let slot = &mut self.slots[index as usize];
        assert!(matches!(slot.state, State::Free));
        // Never the two values of `user_data` that stand for no slot.
        slot.generation = (slot.generation + 1) & 0x7fff_ffff;
        (slot.class, slot.state, slot.keep) = (class, State::InFlight { waker: None, expected: None }, keep);
        OpId { index, generation: slot.generation }
    }

    fn free(&mut self, index: u32) -> Keep {
        let slot = &mut self.slots[index as usize];
        slot.state = State::Free;
        self.free.push(index);
        std::mem::replace(&mut slot.keep, Keep::NOTHING)
    }

    pub fn complete(&mut self, user_data: u64, result: i32, flags: u32) -> Done {
        let (index, generation) = (user_data as u32, (user_data >> 32) as u32);
        let slot = &mut self.slots[index as usize];
        assert_eq!(slot.generation, generation, "a completion for an operation that is over");
        let class = slot.class;
        match &mut slot.state {
            State::InFlight { waker, expected } => {
                let waker = waker.take().filter(|_| *expected != Some(result));
                slot.state = State::Done { result, flags };
                Done { class, waker, garbage: None }
            }
            State::Abandoned => {
                let keep = self.free(index);
                let garbage = Garbage { result, flags, yields_descriptor: keep.yields_descriptor, _keep: keep };
                Done { class, waker: None, garbage: Some(garbage) }
            }
            State::Free | State::Done { .. } => panic!("two completions for one operation"),
        }
    }

    /// `expected` is a result that nobody needs to be woken for: it is found at the next poll.
    pub fn poll(&mut self, id: OpId, cx: &mut Context<'_>, expected: Option<i32>) -> Poll<Completion> {
        let slot = &mut self.slots[id.index as usize];
        assert_eq!(slot.generation, id.generation, "an operation is polled after its completion");
        match &mut slot.state {
            State::InFlight { waker, expected: quiet } => {
                *quiet = expected;
                match waker {
                    Some(waker) => waker.clone_from(cx.waker()),
                    None => *waker = Some(cx.waker().clone()),
                }
                Poll::Pending
            }
            State::Done { result, flags } => {
                let (result, flags) = (*result, *flags);
                let keep = self.free(id.index);
                Poll::Ready(Completion { result, flags, keep })
            }
            State::Free | State::Abandoned => panic!("an abandoned operation is polled"),
        }
    }

    pub fn abandon(&mut self, id: OpId) -> Option<Garbage> {
        let slot = &mut self.slots[id.index as usize];
        assert_eq!(slot.generation, id.generation, "an operation is abandoned after its completion");
        match slot.state {
            State::InFlight { .. } => {
                slot.state = State::Abandoned;
                None
            }
            State::Done { result, flags } => {
                let keep = self.free(id.index);
                Some(Garbage { result, flags, yields_descriptor: keep.yields_descriptor, _keep: keep })
            }
            State::Free | State::Abandoned => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cx() -> Context<'static> {
        Context::from_waker(Waker::noop())
    }

    #[test]
    fn lesson_u7_an_abandoned_operation_keeps_its_memory_until_the_completion() {
        let mut slots = Slots::default();
        let memory = AlignedBuf::zeroed(4096).freeze();
        let watched = memory.clone();
        let keep = Keep { memory: Memory::Slice { _data: memory }, ..Keep::NOTHING };
        let id = slots.insert(Class::File, keep);
        assert!(slots.abandon(id).is_none());
        let watched = watched.try_into_mut().err().expect("the slot holds the memory");
        let done = slots.complete(id.user_data(), -5, 0);
        assert_eq!(done.garbage.map(|g| g.result), Some(-5));
        assert!(watched.try_into_mut().is_ok());
    }

    #[test]
    fn an_expected_result_wakes_nobody_any_other_does() {
        let mut slots = Slots::default();
        for (result, wakes) in [(7, false), (6, true), (-104, true)] {
            let id = slots.insert(Class::Socket, Keep::NOTHING);
            assert!(slots.poll(id, &mut cx(), Some(7)).is_pending());
            assert_eq!(slots.complete(id.user_data(), result, 0).waker.is_some(), wakes, "{result}");
            assert!(slots.poll(id, &mut cx(), Some(7)).is_ready(), "it is found all the same");
        }
        // Who waits in earnest later on is woken.
        let id = slots.insert(Class::Socket, Keep::NOTHING);
        assert!(slots.poll(id, &mut cx(), Some(7)).is_pending());
        assert!(slots.poll(id, &mut cx(), None).is_pending());
        assert!(slots.complete(id.user_data(), 7, 0).waker.is_some());
    }

    #[test]
    fn a_slot_is_used_again_under_another_name() {
        let mut slots = Slots::default();
        let first = slots.insert(Class::File, Keep::NOTHING);
        assert!(slots.poll(first, &mut cx(), None).is_pending());
        slots.complete(first.user_data(), 7, 0);
        match slots.poll(first, &mut cx(), None) {
            Poll::Ready(completion) => assert_eq!(completion.result, 7),
            Poll::Pending => panic!("it was completed"),
        }
        let second = slots.insert(Class::Socket, Keep::NOTHING);
        assert_eq!(second.index, first.index);
        assert_ne!(second.user_data(), first.user_data());
    }

    #[test]
    fn a_descriptor_nobody_takes_is_to_be_closed() {
        let mut slots = Slots::default();
        let id = slots.insert(Class::File, Keep::open(CString::default()));
        slots.complete(id.user_data(), 12, 0);
        let garbage = slots.abandon(id).expect("it was completed");
        assert!(garbage.yields_descriptor && garbage.result == 12);
    }
}
