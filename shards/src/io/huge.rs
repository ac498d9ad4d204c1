//! Memory in huge pages. A write of 2 MiB out of small pages makes the kernel look up, pin and pass on 512 of them, and
//! cut the write where the device takes no more segments; out of one huge page it is one segment.
//!
//! Where the kernel has none to give (none free, switched off, a limit on memory), the same memory comes in small pages.

use std::ptr::null_mut;

/// Size of a huge page, and what it begins at a multiple of.
const PAGE_BYTES: usize = 2 << 20;

/// Whether an allocation of `bytes` is made here: it fills huge pages, so none of it is wasted on what stays unused.
pub(super) fn takes(bytes: usize) -> bool {
    bytes > 0 && bytes.is_multiple_of(PAGE_BYTES)
}

/// Maps `bytes` of zeros, which [`takes`] agreed to, at a multiple of [`PAGE_BYTES`]; null when there is no memory.
pub(super) fn map(bytes: usize) -> *mut u8 {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    let all = bytes + PAGE_BYTES;
    // SAFETY: a new mapping at a place of the kernel's choice touches no other memory.
    let start = unsafe { libc::mmap(null_mut(), all, protection, flags, -1, 0) };
    if start == libc::MAP_FAILED {
        return null_mut();
    }
    let start = start.cast::<u8>();
    let before = start.align_offset(PAGE_BYTES);
    let kept = start.wrapping_add(before);
    // SAFETY: all three ranges lie in the mapping that was just made, and nobody knows of it yet.
    unsafe {
        unmap(start, before);
        unmap(kept.wrapping_add(bytes), all - before - bytes);
        // Refused by a kernel without huge pages: then these are small ones.
        libc::madvise(kept.cast(), bytes, libc::MADV_HUGEPAGE);
    }
    kept
}

/// # Safety
/// The range is of a mapping that [`map`] made; nobody may use it afterwards, nor unmap it again.
pub(super) unsafe fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller vouches for the range. It cannot fail: the range is of whole pages.
        unsafe { libc::munmap(start.cast(), bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::AlignedBuf;

    #[test]
    fn large_memory_lies_where_huge_pages_begin_and_is_zeroed() {
        for bytes in [PAGE_BYTES, 3 * PAGE_BYTES] {
            let mut buf = AlignedBuf::zeroed(bytes);
            assert_eq!((buf.len(), buf.as_ptr() as usize % PAGE_BYTES), (bytes, 0));
            assert!(buf.iter().all(|byte| *byte == 0));
            buf.fill(7);
        }
        assert!(!takes(0) && !takes(PAGE_BYTES - 4096) && !takes(PAGE_BYTES + 4096));
    }
}
