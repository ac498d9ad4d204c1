//! Buffers that the kernel picks from when bytes arrive on a socket, so that an idle connection holds none.

use std::cell::{Cell, RefCell};
use std::io;
use std::sync::atomic::{AtomicU16, Ordering};
use std::task::Waker;

use io_uring::types::BufRingEntry;
use io_uring::IoUring;

use crate::io::AlignedBuf;

pub(super) const GROUP: u16 = 0;

pub(super) struct RecvBuffers {
    /// The ring of free buffers, shared with the kernel: `count` entries of 16 bytes, tail in the first one.
    entries: *mut BufRingEntry,
    buffers: *mut u8,
    /// Owners of what the two pointers point to.
    _memory: [AlignedBuf; 2],
    count: u16,
    buffer_bytes: usize,
    tail: Cell<u16>,
    /// Buffers that hold received bytes.
    taken: Cell<usize>,
    waiting: RefCell<Vec<Waker>>,
}

impl RecvBuffers {
    pub fn register(uring: &IoUring, count: u16, buffer_bytes: u32) -> io::Result<RecvBuffers> {
        let count = count.clamp(8, 4096).next_power_of_two();
        let buffer_bytes = (buffer_bytes as usize).next_multiple_of(4096);
        let mut ring = AlignedBuf::zeroed(usize::from(count) * std::mem::size_of::<BufRingEntry>());
        let mut memory = AlignedBuf::zeroed(usize::from(count) * buffer_bytes);
        let buffers = RecvBuffers {
            entries: ring.as_mut_ptr().cast(),
            buffers: memory.as_mut_ptr(),
            _memory: [ring, memory],
            count,
            buffer_bytes,
            tail: Cell::new(0),
            taken: Cell::new(usize::from(count)),
            waiting: RefCell::default(),
        };
        // SAFETY: the memory is page-aligned, holds `count` entries and lives as long as the ring: both are fields
        // of `Ring`, which closes its io_uring, with every receive, before it is dropped.
        unsafe {
            uring.submitter().register_buf_ring_with_flags(buffers.entries as u64, count, GROUP, 0)?;
        }
        for index in 0..count {
            buffers.give_back(index);
        }
        Ok(buffers)
    }

    /// The first `bytes` of buffer `index`, which the kernel has filled and handed to us.
    pub fn bytes(&self, index: u16, bytes: usize) -> &[u8] {
        assert!(index < self.count && bytes <= self.buffer_bytes);
        // SAFETY: in bounds; between its completion and `give_back` the kernel leaves the buffer alone.
        unsafe { std::slice::from_raw_parts(self.buffers.add(usize::from(index) * self.buffer_bytes), bytes) }
    }

    /// Completions have brought `count` buffers.
    pub fn taken(&self, count: usize) {
        self.taken.set(self.taken.get() + count);
    }

    pub fn give_back(&self, index: u16) {
        assert!(index < self.count);
        let tail = self.tail.get();
        let base = self.entries;
        let address = self.buffers as u64 + (usize::from(index) * self.buffer_bytes) as u64;
        // SAFETY: `base` points to `count` entries that only this thread writes; the kernel reads an entry after it
        // has seen the tail move past it. The entry's fields are set one by one, so that the tail, which lies in
        // the unused half-word of entry 0, keeps its value until it is published.
        unsafe {
            let entry = &mut *base.add(usize::from(tail & (self.count - 1)));
            entry.set_addr(address);
            entry.set_len(self.buffer_bytes as u32);
            entry.set_bid(index);
            let shared_tail = BufRingEntry::tail(base) as *const AtomicU16;
            (*shared_tail).store(tail.wrapping_add(1), Ordering::Release);
        }
        self.tail.set(tail.wrapping_add(1));
        self.taken.set(self.taken.get() - 1);
        if self.waiting.borrow().is_empty() {
            return;
        }
        let waiting = std::mem::take(&mut *self.waiting.borrow_mut());
        waiting.into_iter().for_each(Waker::wake);
    }

    /// Wakes the task once a buffer was given back; `false` when there is a free one right now.
    pub fn wait(&self, waker: &Waker) -> bool {
        let none_free = self.taken.get() >= usize::from(self.count);
        if none_free {
            self.waiting.borrow_mut().push(waker.clone());
        }
        none_free
    }
}
