//! Memory that the ring has registered, so that the kernel neither looks pages up nor pins them per write (E26).

use std::cell::{Cell, RefCell};
use std::io;

use io_uring::IoUring;

use super::Ring;
use crate::io::{ChunkPool, Slice};

const BUFFERS_MAX: u32 = 256;

pub(crate) struct Registered {
    /// Address and length per index.
    ranges: RefCell<Vec<(usize, usize)>>,
    budget_bytes: u64,
    used_bytes: Cell<u64>,
    available: bool,
}

impl Registered {
    pub(super) fn new(uring: &IoUring, budget_bytes: u64) -> Registered {
        let available = uring.submitter().register_buffers_sparse(BUFFERS_MAX).is_ok();
        Registered { ranges: RefCell::default(), budget_bytes, used_bytes: Cell::new(0), available }
    }

    /// The index under which this ring knows the memory of `slice`; `None` when another ring registered it.
    pub(super) fn index_of(&self, slice: &Slice) -> Option<u16> {
        let index = slice.registered()?;
        let (start, bytes) = *self.ranges.borrow().get(usize::from(index))?;
        let at = slice.as_ptr() as usize;
        (at >= start && at + slice.len() <= start + bytes).then_some(index)
    }

    pub fn bytes(&self) -> u64 {
        self.used_bytes.get()
    }
}

impl Ring {
    /// Fills `pool` with up to `chunks` registered chunks, as far as memlock allows; the pool makes plain ones for
    /// the rest. Returns how many were registered.
    pub fn register_chunks(&self, pool: &mut ChunkPool, chunks: usize) -> usize {
        let registered = self.registered();
        for done in 0..chunks {
            let index = registered.ranges.borrow().len();
            let bytes = pool.chunk_bytes() as u64;
            let fits = registered.used_bytes.get() + bytes <= registered.budget_bytes;
            if !registered.available || !fits || index >= BUFFERS_MAX as usize {
                return done;
            }
            let added = pool.add_registered(index as u16, |address, bytes| -> io::Result<()> {
                let range = libc::iovec { iov_base: address.cast(), iov_len: bytes };
                // SAFETY: the range is a live allocation. Should the pool drop it while it is registered, the kernel
                // keeps the pages; no later allocation carries this index, so nothing is written through it again.
                self.with_uring(|uring| unsafe {
                    uring.submitter().register_buffers_update(index as u32, &[range], None)
                })?;
                registered.ranges.borrow_mut().push((address as usize, bytes));
                registered.used_bytes.set(registered.used_bytes.get() + bytes as u64);
                Ok(())
            });
            if added.is_err() {
                return done;
            }
        }
        chunks
    }
}
