//! Block-aligned memory that the kernel may read or write while nobody else touches it.
//!
//! An [`AlignedBuf`] is the only way to write to a range, a [`Slice`] is a shared read-only range; ranges of one
//! allocation never overlap. Both keep the allocation alive by reference count, so a buffer handed to the ring
//! outlives any future that is dropped (lesson U7).

use std::alloc::{alloc_zeroed, dealloc, handle_alloc_error, Layout};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut, Range};
use std::ptr::NonNull;
use std::sync::Arc;

use super::huge;

/// Alignment of every allocation: satisfies O_DIRECT on all block sizes that Linux file systems use by default.
pub const ALIGNMENT: usize = 4096;

pub(crate) struct Memory {
    pointer: NonNull<u8>,
    bytes: usize,
    /// Index among the ring's registered buffers, when this allocation is one of them.
    registered: Option<u16>,
}

// SAFETY: `Memory` is a plain allocation. Access goes through `AlignedBuf` (exclusive range) and `Slice` (shared,
// read-only range), whose ranges never overlap by construction: `split_to` and `freeze` consume what they divide.
unsafe impl Send for Memory {}
// SAFETY: as above; a shared `Memory` gives out no access by itself.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(bytes: usize, registered: Option<u16>) -> Memory {
        let block = Block::zeroed(bytes.max(1).next_multiple_of(ALIGNMENT));
        Memory { pointer: block.pointer, bytes: block.bytes, registered }
    }

    /// At least `bytes`, as somebody left them on the shelf of this thread; new and zeroed when nothing lies there.
    fn reused(bytes: usize) -> Memory {
        let bytes = Shelf::size_class(bytes);
        let kept = SHELF.try_with(|shelf| shelf.borrow_mut().take(bytes)).ok().flatten();
        let block = kept.unwrap_or_else(|| Block::zeroed(bytes));
        Memory { pointer: block.pointer, bytes: block.bytes, registered: None }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let block = Block { pointer: self.pointer, bytes: self.bytes };
        // There is no shelf any more when the thread is ending.
        let refused = SHELF.try_with(|shelf| shelf.borrow_mut().put(block)).unwrap_or(Some(block));
        if let Some(block) = refused {
            // SAFETY: the last reference is gone, and the shelf did not take it.
            unsafe { block.free() };
        }
    }
}

/// An allocation that nobody refers to. Its bytes are initialised: zeroed when it was made, and only ever written since.
#[derive(Clone, Copy)]
struct Block {
    pointer: NonNull<u8>,
    bytes: usize,
}

impl Block {
    /// `bytes`: a multiple of [`ALIGNMENT`], not 0.
    fn layout(bytes: usize) -> Layout {
        Layout::from_size_align(bytes, ALIGNMENT).expect("sizes are bounded far below isize::MAX")
    }

    fn zeroed(bytes: usize) -> Block {
        let layout = Block::layout(bytes);
        let pointer = match huge::takes(bytes) {
            true => huge::map(bytes),
            // SAFETY: the layout has a non-zero size.
            false => unsafe { alloc_zeroed(layout) },
        };
        let Some(pointer) = NonNull::new(pointer) else { handle_alloc_error(layout) };
        Block { pointer, bytes }
    }

    /// # Safety
    /// Nobody may use the memory afterwards, nor free it again.
    unsafe fn free(self) {
        match huge::takes(self.bytes) {
            // SAFETY: mapped in `zeroed` with the same length; the caller vouches for the rest.
            true => unsafe { huge::unmap(self.pointer.as_ptr(), self.bytes) },
            // SAFETY: allocated in `zeroed` with the same layout; the caller vouches for the rest.
            false => unsafe { dealloc(self.pointer.as_ptr(), Block::layout(self.bytes)) },
        }
    }
}

/// Memory that was let go on this thread, kept for [`AlignedBuf::reused`]: write and read-back buffers turn over with
/// every commit, and zeroing them, or having the kernel do it, would cost more than all that is done with them.
#[derive(Default)]
struct Shelf {
    /// By size.
    blocks: BTreeMap<usize, Vec<Block>>,
    bytes: usize,
}

/// What a thread keeps at most: the write and read-back buffers of the commits that run at one time.
const SHELF_BYTES_MAX: usize = 32 << 20;
/// A commit of 8 MiB as another node sends it: records, archive, and what rounding adds. Larger ones are rare, and cost
/// more to fill than to zero.
const SHELVED_BYTES_MAX: usize = 9 << 20;

thread_local! {
    static SHELF: RefCell<Shelf> = RefCell::default();
}

impl Shelf {
    /// Rounded up, by an eighth at most from 32 KiB on, so that buffers of about the same size fit each other's place.
    fn size_class(bytes: usize) -> usize {
        let step = (bytes.next_power_of_two() / 16).max(ALIGNMENT);
        bytes.max(1).next_multiple_of(step)
    }

    fn take(&mut self, size: usize) -> Option<Block> {
        let block = self.blocks.get_mut(&size)?.pop()?;
        self.bytes -= size;
        Some(block)
    }

    /// Keeps a block that nobody refers to any more, or returns it. A full shelf is cleared: what lies there may be of
    /// sizes that nobody asks for these days.
    fn put(&mut self, block: Block) -> Option<Block> {
        if block.bytes > SHELVED_BYTES_MAX || block.bytes != Shelf::size_class(block.bytes) {
            return Some(block);
        }
        if self.bytes + block.bytes > SHELF_BYTES_MAX {
            self.clear();
        }
        self.bytes += block.bytes;
        self.blocks.entry(block.bytes).or_default().push(block);
        None
    }

    fn clear(&mut self) {
        self.bytes = 0;
        for block in self.blocks.values_mut().flat_map(|blocks| blocks.drain(..)) {
            // SAFETY: what lies on the shelf belongs to it alone, and was just taken off.
            unsafe { block.free() };
        }
    }
}

impl Drop for Shelf {
    fn drop(&mut self) {
        self.clear();
    }
}

/// An exclusively writable range of an aligned allocation.
pub struct AlignedBuf {
    memory: Arc<Memory>,
    start: usize,
    end: usize,
}

impl AlignedBuf {
    /// Allocates at least `bytes`, rounded up to [`ALIGNMENT`]; the length is the rounded one.
    pub fn zeroed(bytes: usize) -> AlignedBuf {
        AlignedBuf::over(Arc::new(Memory::new(bytes, None)))
    }

    /// As [`zeroed`](Self::zeroed), but with arbitrary content and rounded up further, by an eighth at most: for what
    /// is overwritten before anybody looks at it.
    pub fn reused(bytes: usize) -> AlignedBuf {
        AlignedBuf::over(Arc::new(Memory::reused(bytes)))
    }

    fn over(memory: Arc<Memory>) -> AlignedBuf {
        let end = memory.bytes;
        AlignedBuf { memory, start: 0, end }
    }

    /// Cuts the first `bytes` off into a buffer of their own. `bytes` must not exceed the length.
    pub fn split_to(&mut self, bytes: usize) -> AlignedBuf {
        assert!(bytes <= self.len(), "split at {bytes} of {}", self.len());
        let front = AlignedBuf { memory: self.memory.clone(), start: self.start, end: self.start + bytes };
        self.start += bytes;
        front
    }

    /// Drops everything behind the first `bytes`.
    pub fn truncate(&mut self, bytes: usize) {
        assert!(bytes <= self.len());
        self.end = self.start + bytes;
    }

    /// Gives up the right to write: the range can be shared from here on.
    pub fn freeze(self) -> Slice {
        Slice { memory: self.memory, start: self.start, end: self.end }
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: in bounds by construction; the range is exclusively ours, and initialised (see `Block`).
        unsafe { std::slice::from_raw_parts(self.memory.pointer.as_ptr().add(self.start), self.end - self.start) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; no `Slice` or other `AlignedBuf` covers any byte of the range.
        unsafe { std::slice::from_raw_parts_mut(self.memory.pointer.as_ptr().add(self.start), self.end - self.start) }
    }
}

/// A shared, read-only range of an aligned allocation. Cheap to clone, may cross threads.
#[derive(Clone)]
pub struct Slice {
    memory: Arc<Memory>,
    start: usize,
    end: usize,
}

impl Slice {
    /// No bytes. Costs no memory: all of a thread share one allocation.
    pub fn empty() -> Slice {
        thread_local! {
            static EMPTY: Slice = AlignedBuf::zeroed(1).freeze().slice(0..0);
        }
        EMPTY.with(Slice::clone)
    }

    /// Copies `bytes` into memory of their own.
    pub fn copy_from(bytes: &[u8]) -> Slice {
        let mut buf = AlignedBuf::zeroed(bytes.len());
        buf[..bytes.len()].copy_from_slice(bytes);
        buf.truncate(bytes.len());
        buf.freeze()
    }

    /// The sub-range `range`, relative to this slice.
    pub fn slice(&self, range: Range<usize>) -> Slice {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {}", self.len());
        Slice { memory: self.memory.clone(), start: self.start + range.start, end: self.start + range.end }
    }

    /// Takes the memory back for writing, if this is the last reference to the whole allocation.
    pub fn try_into_mut(mut self) -> Result<AlignedBuf, Slice> {
        if Arc::get_mut(&mut self.memory).is_some() {
            Ok(AlignedBuf { memory: self.memory, start: self.start, end: self.end })
        } else {
            Err(self)
        }
    }

    /// Bytes of the whole allocation, which stays as long as any range of it.
    pub fn allocation_bytes(&self) -> usize {
        self.memory.bytes
    }

    pub(crate) fn registered(&self) -> Option<u16> {
        self.memory.registered
    }
}

impl Deref for Slice {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: in bounds by construction; nobody can write to a frozen range (see `Memory`).
        unsafe { std::slice::from_raw_parts(self.memory.pointer.as_ptr().add(self.start), self.end - self.start) }
    }
}

impl std::fmt::Debug for Slice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slice({} bytes)", self.len())
    }
}

/// A bounded set of equal chunks, made on demand and used again once every range of them is gone.
///
/// No free list and no return path: a chunk is free when the pool holds its only reference, whichever thread
/// dropped the last other one.
pub struct ChunkPool {
    chunks: Vec<Arc<Memory>>,
    chunk_bytes: usize,
    chunks_max: usize,
}

impl ChunkPool {
    pub fn new(chunk_bytes: usize, chunks_max: usize) -> ChunkPool {
        ChunkPool {
            chunks: Vec::new(),
            chunk_bytes: chunk_bytes.next_multiple_of(ALIGNMENT),
            chunks_max: chunks_max.max(1),
        }
    }

    /// Adds a chunk that the ring has registered under `index`; `register` gets its address and length.
    pub(crate) fn add_registered<E>(
        &mut self,
        index: u16,
        register: impl FnOnce(*mut u8, usize) -> Result<(), E>,
    ) -> Result<(), E> {
        let memory = Memory::new(self.chunk_bytes, Some(index));
        register(memory.pointer.as_ptr(), memory.bytes)?;
        self.chunks.push(Arc::new(memory));
        Ok(())
    }

    /// A free chunk, or `None` when all are in use and the pool is at its bound. Content is arbitrary.
    pub fn take(&mut self) -> Option<AlignedBuf> {
        for chunk in &mut self.chunks {
            if Arc::get_mut(chunk).is_some() {
                return Some(AlignedBuf::over(chunk.clone()));
            }
        }
        if self.chunks.len() >= self.chunks_max {
            return None;
        }
        let chunk = Arc::new(Memory::new(self.chunk_bytes, None));
        self.chunks.push(chunk.clone());
        Some(AlignedBuf::over(chunk))
    }

    pub fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// Chunks that could be taken right now, made or not.
    pub fn free(&mut self) -> usize {
        let idle = self.chunks.iter_mut().filter_map(|c| Arc::get_mut(c).map(|_| ())).count();
        idle + self.chunks_max.saturating_sub(self.chunks.len())
    }

    pub fn bytes_max(&self) -> usize {
        self.chunks_max * self.chunk_bytes
    }

    pub fn bytes_allocated(&self) -> usize {
        self.chunks.len() * self.chunk_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lesson_u7_a_frozen_range_outlives_its_buffer() {
        let mut buf = AlignedBuf::zeroed(8192);
        buf[..5].copy_from_slice(b"hello");
        let mut front = buf.split_to(4096);
        front[4095] = 9;
        let slice = front.freeze();
        buf[0] = 1;
        drop(buf);
        assert_eq!((&slice[..5], slice[4095]), (&b"hello"[..], 9));
        assert_eq!(slice.as_ptr() as usize % ALIGNMENT, 0);
    }

    #[test]
    fn a_chunk_is_free_again_once_its_last_range_is_gone() {
        let mut pool = ChunkPool::new(8192, 2);
        let mut a = pool.take().expect("first of two");
        let front = a.split_to(4096).freeze();
        let _b = pool.take().expect("second of two");
        drop(a);
        assert!(pool.take().is_none());
        assert_eq!(pool.free(), 0);
        std::thread::spawn(move || drop(front)).join().expect("dropping cannot fail");
        assert_eq!(pool.free(), 1);
        assert!(pool.take().is_some());
    }

    #[test]
    fn lesson_u7_memory_is_reused_only_once_every_range_of_it_is_gone() {
        let mut first = AlignedBuf::reused(100_000);
        let address = first.as_ptr();
        first[0] = 7;
        let range = first.freeze().slice(0..1);
        let second = AlignedBuf::reused(100_000);
        assert_ne!(second.as_ptr(), address);
        assert_eq!(range[0], 7);
        drop(range);
        let third = AlignedBuf::reused(99_000);
        assert_eq!((third.as_ptr(), third.len() >= 99_000), (address, true));
        assert!(AlignedBuf::zeroed(third.len()).iter().all(|byte| *byte == 0), "what is asked for zeroed is");
    }

    #[test]
    fn the_memory_of_a_whole_commit_from_another_node_is_kept() {
        let frame_bytes = (8 << 20) + (200 << 10);
        let first = AlignedBuf::reused(frame_bytes);
        let address = first.as_ptr();
        drop(first);
        assert_eq!(AlignedBuf::reused(frame_bytes).as_ptr(), address);
    }

    #[test]
    fn a_thread_keeps_a_bounded_amount_of_memory() {
        let many: Vec<AlignedBuf> = (0..64).map(|_| AlignedBuf::reused(1 << 20)).collect();
        drop(many);
        drop(AlignedBuf::reused(SHELVED_BYTES_MAX + 1));
        let kept = SHELF.with(|shelf| shelf.borrow().bytes);
        assert!(kept > 0 && kept <= SHELF_BYTES_MAX, "{kept} bytes kept");
        for bytes in [0, 1, 4096, 4097, 40_000, 1 << 20, (1 << 20) + 1] {
            let size = Shelf::size_class(bytes);
            assert!(
                size >= bytes && size <= (bytes + bytes / 8).next_multiple_of(ALIGNMENT).max(ALIGNMENT),
                "{bytes}: {size}"
            );
            assert_eq!(Shelf::size_class(size), size);
        }
    }

    #[test]
    fn memory_comes_back_only_without_other_references() {
        let slice = AlignedBuf::zeroed(4096).freeze();
        let other = slice.slice(1..2);
        let slice = slice.try_into_mut().err().expect("shared");
        drop(other);
        assert!(slice.try_into_mut().is_ok());
    }
}
