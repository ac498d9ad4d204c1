//! One io_uring for everything a shard does with the kernel: files, sockets, waking up.
//!
//! The ring belongs to the thread that made it (`SINGLE_ISSUER | DEFER_TASKRUN`). Operations in flight are bounded
//! below the size of the completion queue, so that it cannot overflow (lesson U6); what is beyond the bound waits
//! here, in order. What an operation reads or writes is owned by its slot until its completion (lesson U7).

mod address;
mod disk;
mod net;
#[cfg(test)]
mod net_tests;
mod ops;
mod recv_buffers;
mod registered;
mod setup;
mod slots;
mod udp;
#[cfg(test)]
mod udp_tests;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use io_uring::{cqueue, opcode, squeue, types, IoUring};

use crate::histogram::{histogram, Histogram};
use crate::rt::RuntimeMetrics;
use crate::spsc::Doorbell;

pub use disk::{RingDisk, RingFile};
pub use net::{Listener, Stream};
pub(crate) use ops::{Descriptor, Op};
pub(crate) use slots::{Class, Completion, Keep, Memory, OpId};
pub use udp::{Received, Route, Sent, Udp, UDP_SEGMENTS_MAX, UDP_SEND_BYTES_MAX};

use recv_buffers::RecvBuffers;
use registered::Registered;
use setup::{explain_setup, retry_while_short};
use slots::Slots;

/// A completion that belongs to no slot: a doorbell rung by another shard, a cancellation, a failed ring of ours.
pub(crate) const IGNORED: u64 = u64::MAX;
/// The standing read on the ring's eventfd.
const EVENT: u64 = u64::MAX - 1;
/// Completions that need no slot: doorbells of at most that many peers, failed rings and cancellations of one turn.
const CQ_HEADROOM: u32 = 1024;
/// Operations kept free for files and short work, so that waiting sockets can never hold up the disk.
const FILE_RESERVE: usize = 1024;

const IO_WORKERS_MAX: u32 = 16;

/// Sizes of a ring.
#[derive(Clone, Debug)]
pub struct RingSizes {
    /// Submission queue entries; a fuller turn costs a second system call.
    pub submissions: u32,
    /// Operations in flight at most; an idle connection needs one.
    pub in_flight_max: u32,
    /// Buffers that the kernel picks from when bytes arrive; idle connections hold none.
    pub recv_buffers: u16,
    pub recv_buffer_bytes: u32,
    /// Bytes that may be registered (locked) by this ring (E26).
    pub memlock_budget_bytes: u64,
}

impl Default for RingSizes {
    fn default() -> RingSizes {
        RingSizes {
            submissions: 512,
            in_flight_max: 15 * 1024,
            recv_buffers: 256,
            recv_buffer_bytes: 16 * 1024,
            memlock_budget_bytes: 4 << 20,
        }
    }
}

struct Core {
    uring: IoUring,
    slots: Slots,
    in_flight: usize,
    sockets_in_flight: usize,
    files_ended: u64,
    waiting_files: VecDeque<squeue::Entry>,
    waiting_sockets: VecDeque<squeue::Entry>,
    /// Cancellations that the submission queue had no room for: without them a receive that nobody waits for would hold
    /// its socket until the peer closes.
    cancels_owed: Vec<OpId>,
    counters: RuntimeMetrics,
    /// Microseconds of each enter that did not wait (E30).
    submit_micros: Histogram,
}

pub(crate) struct Ring {
    core: RefCell<Core>,
    in_flight_max: usize,
    sockets_max: usize,
    event: Arc<OwnedFd>,
    event_value: Box<Cell<u64>>,
    event_armed: Cell<bool>,
    ring_fd: RawFd,
    has_msg_ring: bool,
    has_ftruncate: bool,
    closed: Cell<bool>,
    recv: RecvBuffers,
    registered: Registered,
    connections: Cell<u64>,
    started: Instant,
    started_cpu_nanos: u64,
    spin_nanos: Cell<u64>,
    /// Send buffers that no stream uses right now.
    spares: RefCell<Vec<Vec<u8>>>,
    woken: RefCell<Vec<Waker>>,
    dropped: RefCell<Vec<slots::Garbage>>,
}

thread_local! {
    static CURRENT: RefCell<Weak<Ring>> = const { RefCell::new(Weak::new()) };
}

/// The ring of the calling thread, if it has one.
pub(crate) fn current() -> Option<Rc<Ring>> {
    CURRENT.with(|ring| ring.borrow().upgrade())
}

impl Ring {
    pub fn new(sizes: &RingSizes) -> io::Result<Rc<Ring>> {
        let cq = (sizes.in_flight_max + CQ_HEADROOM).next_power_of_two();
        let build = || {
            IoUring::builder()
                .setup_single_issuer()
                .setup_defer_taskrun()
                .setup_taskrun_flag()
                .setup_submit_all()
                .setup_cqsize(cq)
                .build(sizes.submissions)
        };
        let uring = retry_while_short(build).map_err(explain_setup)?;
        let params = uring.params();
        if !params.is_feature_nodrop() || !params.is_feature_ext_arg() {
            return Err(io::Error::other("io_uring of this kernel is too old: Linux 6.1 or newer is needed"));
        }
        // Opens and syncs run on the kernel's workers: enough to keep a drive busy, not one per partition.
        uring.submitter().register_iowq_max_workers(&mut [IO_WORKERS_MAX; 2])?;
        let mut probe = io_uring::Probe::new();
        uring.submitter().register_probe(&mut probe)?;
        // SAFETY: plain system call; the result is checked before it is used.
        let event = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if event < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: `event` was just made and is owned by nobody else.
        let event = unsafe { OwnedFd::from_raw_fd(event) };
        let in_flight_max = (params.cq_entries() - CQ_HEADROOM) as usize;
        let recv = RecvBuffers::register(&uring, sizes.recv_buffers, sizes.recv_buffer_bytes)?;
        let registered = Registered::new(&uring, sizes.memlock_budget_bytes);
        let ring = Rc::new(Ring {
            ring_fd: uring.as_raw_fd(),
            in_flight_max,
            sockets_max: in_flight_max - FILE_RESERVE.min(in_flight_max / 2),
            event: Arc::new(event),
            event_value: Box::new(Cell::new(0)),
            event_armed: Cell::new(false),
            has_msg_ring: probe.is_supported(opcode::MsgRingData::CODE),
            has_ftruncate: probe.is_supported(opcode::Ftruncate::CODE),
            closed: Cell::new(false),
            recv,
            registered,
            connections: Cell::new(0),
            started: Instant::now(),
            started_cpu_nanos: thread_cpu_nanos(),
            spin_nanos: Cell::new(0),
            spares: RefCell::default(),
            woken: RefCell::default(),
            dropped: RefCell::default(),
            core: RefCell::new(Core {
                uring,
                slots: Slots::default(),
                in_flight: 0,
                sockets_in_flight: 0,
                files_ended: 0,
                waiting_files: VecDeque::new(),
                waiting_sockets: VecDeque::new(),
                cancels_owed: Vec::new(),
                counters: RuntimeMetrics::default(),
                submit_micros: histogram(),
            }),
        });
        ring.arm_event();
        CURRENT.with(|current| *current.borrow_mut() = Rc::downgrade(&ring));
        Ok(ring)
    }

    /// Queues an operation. It is submitted at the end of the turn at the latest.
    ///
    /// # Safety
    /// Every pointer in `entry` points into heap memory that `keep` owns, or into memory that lives as long as the
    /// ring does. Descriptors stay open until the completion: `keep` holds them, or they are closed through this
    /// ring.
    pub unsafe fn start(&self, class: Class, entry: squeue::Entry, keep: Keep) -> OpId {
        let mut core = self.core.borrow_mut();
        let id = core.slots.insert(class, keep);
        let entry = entry.user_data(id.user_data());
        let core = &mut *core;
        let queue = match class {
            Class::File => &mut core.waiting_files,
            Class::Socket => &mut core.waiting_sockets,
        };
        queue.push_back(entry);
        self.admit(core);
        id
    }

    /// Moves waiting entries to the submission queue, as far as the bounds allow.
    fn admit(&self, core: &mut Core) {
        if core.waiting_files.is_empty() && core.waiting_sockets.is_empty() && core.cancels_owed.is_empty() {
            return;
        }
        let mut submission = core.uring.submission();
        while let Some(id) = core.cancels_owed.last() {
            // SAFETY: such an entry points to no memory.
            if unsafe { submission.push(&cancel_entry(*id)) }.is_err() {
                return;
            }
            core.cancels_owed.pop();
        }
        while core.in_flight < self.in_flight_max && !submission.is_full() {
            let socket_may_go = core.sockets_in_flight < self.sockets_max;
            let entry = match core.waiting_files.pop_front() {
                Some(entry) => entry,
                None if socket_may_go => match core.waiting_sockets.pop_front() {
                    Some(entry) => {
                        core.sockets_in_flight += 1;
                        entry
                    }
                    None => return,
                },
                None => return,
            };
            core.in_flight += 1;
            // SAFETY: `start` was promised that all memory behind the entry is owned by its slot, which lives until
            // the completion arrives.
            let pushed = unsafe { submission.push(&entry) };
            assert!(pushed.is_ok(), "the submission queue was not full");
        }
    }

    /// Rings another shard's ring. Costs no system call of its own: it leaves with this turn's submissions.
    pub fn ring_other(&self, ring_fd: RawFd) -> bool {
        if !self.has_msg_ring || self.closed.get() {
            return false;
        }
        let entry = opcode::MsgRingData::new(types::Fd(ring_fd), 0, IGNORED, None)
            .build()
            .flags(squeue::Flags::SKIP_SUCCESS)
            .user_data(IGNORED);
        self.push_unowned(&entry)
    }

    /// Asks the kernel to end an operation; its completion comes all the same.
    fn cancel(&self, id: OpId) {
        if self.closed.get() {
            return; // everything is being cancelled
        }
        {
            let core = &mut *self.core.borrow_mut();
            let held_back = |entry: &squeue::Entry| entry.get_user_data() == id.user_data();
            if let Some(at) = core.waiting_sockets.iter().position(held_back) {
                // It never left: answer for the kernel.
                core.waiting_sockets.remove(at);
                let done = core.slots.complete(id.user_data(), -libc::ECANCELED, 0);
                debug_assert!(done.garbage.is_none(), "an operation is cancelled before it is abandoned");
                return;
            }
        }
        if !self.push_unowned(&cancel_entry(id)) {
            self.core.borrow_mut().cancels_owed.push(id);
        }
    }

    /// For entries without memory or descriptor behind them. Flushes when the submission queue is full.
    fn push_unowned(&self, entry: &squeue::Entry) -> bool {
        for _ in 0..2 {
            // SAFETY: such an entry points to no memory.
            if unsafe { self.core.borrow_mut().uring.submission().push(entry) }.is_ok() {
                return true;
            }
            self.enter(None);
        }
        false
    }

    /// Before a turn blocks: whether to submit in an enter of its own first, to see how long that takes. Submitting a
    /// write can block (E30), and inside a waiting enter that cannot be told from waiting. One turn in 17 pays the
    /// second system call.
    pub fn samples_submission(&self) -> bool {
        const ONE_IN: u64 = 17;
        let mut core = self.core.borrow_mut();
        core.counters.turns.is_multiple_of(ONE_IN) && !core.uring.submission().is_empty()
    }

    /// One `io_uring_enter`. `wait` is `None` to submit and look, or the longest time to wait for a completion.
    pub fn enter(&self, wait: Option<Option<Duration>>) {
        let mut core = self.core.borrow_mut();
        self.admit(&mut core);
        let core = &mut *core;
        let queued = core.uring.submission().len() as u64;
        let result = match wait {
            None => {
                let before = Instant::now();
                let result = core.uring.submitter().submit_with_args(0, &types::SubmitArgs::new());
                let nanos = before.elapsed().as_nanos() as u64;
                core.counters.enter_nanos += nanos;
                crate::histogram::record(&mut core.submit_micros, nanos / 1000);
                result
            }
            Some(None) => core.uring.submit_and_wait(1),
            Some(Some(timeout)) => {
                let timespec = types::Timespec::from(timeout);
                core.uring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&timespec))
            }
        };
        let left = core.uring.submission().len() as u64;
        core.counters.enters += 1;
        core.counters.submissions += queued.saturating_sub(left);
        if let Err(error) = result {
            match error.raw_os_error() {
                // Time is up, or "again": the entries stay queued and go with the next enter (lesson U7).
                Some(libc::ETIME | libc::EAGAIN | libc::EBUSY | libc::EINTR) => {}
                _ => panic!("io_uring_enter failed, the shard cannot go on: {error}"),
            }
        }
    }

    /// Whether an enter would find something to do without waiting.
    pub fn wants_enter(&self) -> bool {
        let mut core = self.core.borrow_mut();
        self.admit(&mut core);
        let submission = core.uring.submission();
        !submission.is_empty() || submission.taskrun() || submission.cq_overflow()
    }

    /// Whether completions can be reaped, or would appear at the next enter.
    pub fn has_completions(&self) -> bool {
        let mut core = self.core.borrow_mut();
        !core.uring.completion().is_empty() || core.uring.submission().taskrun()
    }

    /// Takes every completion there is and wakes the tasks that wait for them. Returns how many came.
    pub fn reap(&self) -> usize {
        const BATCH: usize = 64;
        let mut reaped = 0;
        if self.core.borrow_mut().uring.completion().is_empty() {
            return 0;
        }
        let mut woken = self.woken.take();
        let mut garbage = self.dropped.take();
        loop {
            let mut batch: [(u64, i32, u32); BATCH] = [(0, 0, 0); BATCH];
            let mut count = 0;
            let mut core = self.core.borrow_mut();
            for (slot, entry) in batch.iter_mut().zip(core.uring.completion()) {
                *slot = (entry.user_data(), entry.result(), entry.flags());
                count += 1;
            }
            let overflow = core.uring.completion().overflow();
            assert_eq!(overflow, 0, "the completion queue overflowed although operations in flight are bounded");
            core.counters.completions += count as u64;
            self.recv.taken(batch[..count].iter().filter(|entry| cqueue::buffer_select(entry.2).is_some()).count());
            reaped += count;
            for &(user_data, result, flags) in &batch[..count] {
                match user_data {
                    IGNORED => {}
                    EVENT => self.event_armed.set(false),
                    _ => self.complete(&mut core, user_data, result, flags, &mut woken, &mut garbage),
                }
            }
            drop(core);
            // Outside of the borrow: dropping the last clone of a file starts its close.
            for garbage in garbage.drain(..) {
                self.discard(garbage);
            }
            woken.drain(..).for_each(Waker::wake);
            if count < BATCH {
                break;
            }
        }
        self.woken.replace(woken);
        self.dropped.replace(garbage);
        self.arm_event();
        reaped
    }

    fn complete(
        &self,
        core: &mut Core,
        user_data: u64,
        result: i32,
        flags: u32,
        woken: &mut Vec<Waker>,
        garbage: &mut Vec<slots::Garbage>,
    ) {
        core.in_flight -= 1;
        let done = core.slots.complete(user_data, result, flags);
        match done.class {
            Class::Socket => core.sockets_in_flight -= 1,
            Class::File => core.files_ended += 1,
        }
        woken.extend(done.waker);
        garbage.extend(done.garbage);
    }

    /// What a completion that nobody waits for leaves behind.
    fn discard(&self, garbage: slots::Garbage) {
        if let Some(buffer) = cqueue::buffer_select(garbage.flags) {
            self.recv.give_back(buffer);
        }
        if garbage.yields_descriptor && garbage.result >= 0 {
            self.close_fd(garbage.result);
        }
    }

    /// Closes a descriptor through the ring; at once when the ring has gone.
    pub(crate) fn close_fd(&self, fd: RawFd) {
        if self.closed.get() {
            // SAFETY: the caller owns the descriptor and gives it up.
            unsafe { libc::close(fd) };
            return;
        }
        let entry = opcode::Close::new(types::Fd(fd)).build();
        // SAFETY: the entry points to no memory.
        let id = unsafe { self.start(Class::File, entry, Keep::NOTHING) };
        self.abandon(id);
    }

    /// Result of an operation, once. The waker is kept until then.
    pub fn poll_op(&self, id: OpId, cx: &mut Context<'_>) -> Poll<Completion> {
        self.core.borrow_mut().slots.poll(id, cx, None)
    }

    /// As [`Ring::poll_op`], but the `expected` result wakes nobody: it is found at the next poll.
    pub fn poll_op_quietly(&self, id: OpId, cx: &mut Context<'_>, expected: i32) -> Poll<Completion> {
        self.core.borrow_mut().slots.poll(id, cx, Some(expected))
    }

    /// Nobody waits for the operation any more. Its memory stays until the kernel is done with it (lesson U7).
    pub fn abandon(&self, id: OpId) {
        let garbage = self.core.borrow_mut().slots.abandon(id);
        if let Some(garbage) = garbage {
            self.discard(garbage);
        }
    }

    fn arm_event(&self) {
        if self.event_armed.get() || self.closed.get() {
            return;
        }
        let entry = opcode::Read::new(types::Fd(self.event.as_raw_fd()), self.event_value.as_ptr().cast(), 8);
        if self.push_unowned(&entry.build().user_data(EVENT)) {
            self.event_armed.set(true);
        }
    }

    fn spare_buffer(&self) -> Vec<u8> {
        // An idle connection may keep the buffer of its last answer: small, it grows where answers are large.
        const BYTES: usize = 512;
        self.spares.borrow_mut().pop().unwrap_or_else(|| Vec::with_capacity(BYTES))
    }

    fn keep_spare(&self, mut buffer: Vec<u8>) {
        const SPARES_MAX: usize = 256;
        let mut spares = self.spares.borrow_mut();
        if spares.len() < SPARES_MAX {
            buffer.clear();
            spares.push(buffer);
        }
    }

    /// The bell that wakes this ring's thread.
    pub fn doorbell(&self) -> Doorbell {
        Doorbell::of_ring(self.ring_fd, self.event.clone(), self.has_msg_ring)
    }

    /// Connections that can be open at once without starving each other of operations.
    pub fn connections_max(&self) -> usize {
        self.sockets_max / 2
    }

    pub fn registered(&self) -> &Registered {
        &self.registered
    }

    pub fn with_uring<T>(&self, act: impl FnOnce(&IoUring) -> T) -> T {
        act(&self.core.borrow().uring)
    }

    pub fn count_turn(&self) {
        self.core.borrow_mut().counters.turns += 1;
    }

    /// Whether the drive has something to do for this thread.
    pub fn files_in_flight(&self) -> bool {
        let core = self.core.borrow();
        core.in_flight > core.sockets_in_flight
    }

    /// Operations of the drive that have ended.
    pub fn files_ended(&self) -> u64 {
        self.core.borrow().files_ended
    }

    /// Time that went into looking for completions without blocking: neither busy nor asleep.
    pub fn count_spin(&self, spun: Duration) {
        self.spin_nanos.set(self.spin_nanos.get() + spun.as_nanos() as u64);
    }

    pub fn metrics(&self) -> RuntimeMetrics {
        let mut core = self.core.borrow_mut();
        let mut metrics = core.counters.clone();
        metrics.cq_overflow = u64::from(core.uring.completion().overflow());
        metrics.ring_depth = core.in_flight as u64;
        metrics.connections = self.connections.get();
        // The thread's CPU time, not the time outside of enter: most of the work of a socket is done inside.
        let age = self.started.elapsed().as_nanos() as u64;
        let busy = (thread_cpu_nanos() - self.started_cpu_nanos).saturating_sub(self.spin_nanos.get());
        metrics.busy_nanos = busy.min(age);
        metrics.idle_nanos = age - metrics.busy_nanos;
        metrics.poll_nanos = self.spin_nanos.get();
        metrics
    }

    pub fn submit_micros(&self) -> Histogram {
        self.core.borrow().submit_micros.clone()
    }

    /// Cancels what can be cancelled and waits for the rest. What the kernel still holds after five seconds is
    /// leaked, never freed under its hands.
    pub fn close(self: &Rc<Self>) {
        if self.closed.replace(true) {
            return;
        }
        let entry = opcode::AsyncCancel2::new(types::CancelBuilder::any().all()).build().user_data(IGNORED);
        let deadline = Instant::now() + Duration::from_secs(5);
        while self.busy() {
            if Instant::now() > deadline {
                std::mem::forget(self.clone());
                return;
            }
            self.push_unowned(&entry);
            self.enter(Some(Some(Duration::from_millis(10))));
            self.reap();
        }
    }

    fn busy(&self) -> bool {
        let core = self.core.borrow();
        let waiting = core.waiting_files.len() + core.waiting_sockets.len();
        core.in_flight > 0 || waiting > 0 || self.event_armed.get()
    }
}

fn cancel_entry(id: OpId) -> squeue::Entry {
    let entry = opcode::AsyncCancel::new(id.user_data()).build();
    entry.flags(squeue::Flags::SKIP_SUCCESS).user_data(IGNORED)
}

fn thread_cpu_nanos() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is valid for the call, which cannot fail for this clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
