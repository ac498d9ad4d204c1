//! The ring runtime on the real kernel. No test here asserts how long something takes, except where a pause of
//! 100 ms is the defect itself.

use std::cell::Cell;
use std::path::PathBuf;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use super::ring::{run_shard_thread, Options, RingHandle};
use crate::io::{AlignedBuf, Caching, ChunkPool, Open, Slice};
use crate::rt::{self, Queue, Spin};

/// Runs `main` on a ring of its own; panics reach the test.
pub(crate) fn run<T: 'static, F: std::future::Future<Output = T> + 'static>(main: impl FnOnce(RingHandle) -> F) -> T {
    let mut options = Options::new("test");
    options.abort_on_panic = false;
    options.sizes.in_flight_max = 3 * 1024;
    options.sizes.memlock_budget_bytes = 256 << 10;
    run_shard_thread(options, main).expect("the test machine has io_uring")
}

pub(crate) fn scratch(name: &str) -> PathBuf {
    let path = std::env::temp_dir().join(format!("narad-ring-{name}-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir(&path).expect("the temporary directory is writable");
    path
}

#[test]
fn spawned_tasks_of_all_queues_run() {
    let sum = run(|_| async {
        let tasks: Vec<_> = [Queue::Foreground, Queue::Consume, Queue::Background]
            .into_iter()
            .zip([1, 20, 300])
            .map(|(queue, value)| {
                rt::spawn(queue, async move {
                    rt::yield_now().await;
                    value
                })
            })
            .collect();
        let mut sum = 0;
        for task in tasks {
            sum += task.await;
        }
        sum
    });
    assert_eq!(sum, 321);
}

#[test]
fn lesson_g7_sleeps_end_in_the_order_of_their_deadlines() {
    let order = run(|_| async {
        let log: Rc<std::cell::RefCell<Vec<u64>>> = Rc::default();
        let tasks: Vec<_> = [9, 1, 5, 3]
            .map(|ms| {
                let log = log.clone();
                rt::spawn(Queue::Foreground, async move {
                    rt::sleep(Duration::from_millis(ms * 3)).await;
                    log.borrow_mut().push(ms);
                })
            })
            .into_iter()
            .collect();
        for task in tasks {
            task.await;
        }
        let order = log.borrow().clone();
        order
    });
    assert_eq!(order, [1, 3, 5, 9]);
}

#[test]
fn a_busy_task_that_yields_starves_no_timer_and_no_other_queue() {
    for busy in [Queue::Foreground, Queue::Consume, Queue::Background] {
        run(move |_| async move {
            let stop: Rc<Cell<bool>> = Rc::default();
            let seen = stop.clone();
            let spinner = rt::spawn(busy, async move {
                while !seen.get() {
                    rt::yield_now().await;
                }
            });
            for queue in [Queue::Foreground, Queue::Consume, Queue::Background] {
                rt::spawn(queue, async { rt::sleep(Duration::from_millis(1)).await }).await;
            }
            stop.set(true);
            spinner.await;
        });
    }
}

#[test]
fn blocking_work_comes_back_through_the_doorbell() {
    let sum = run(|_| async {
        let mut sum = 0;
        for round in 0..200u64 {
            sum += rt::blocking(move || round).await;
        }
        sum
    });
    assert_eq!(sum, 199 * 200 / 2);
}

#[test]
fn what_is_left_is_dropped_when_main_ends() {
    struct Flag(Rc<Cell<u32>>);
    impl Drop for Flag {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }
    let dropped = run(|_| async {
        let dropped: Rc<Cell<u32>> = Rc::default();
        for queue in [Queue::Foreground, Queue::Consume, Queue::Background] {
            let flag = Flag(dropped.clone());
            rt::spawn(queue, async move {
                let _flag = flag;
                loop {
                    rt::sleep(Duration::from_secs(3600)).await;
                }
            });
        }
        rt::sleep(Duration::from_millis(1)).await;
        dropped
    });
    assert_eq!(dropped.get(), 3);
}

#[test]
fn random_numbers_differ() {
    let (first, second) = run(|_| async { (rt::random_u64(), rt::random_u64()) });
    assert_ne!(first, second);
}

#[test]
fn files_are_written_durably_and_read_back_past_the_cache() {
    let root = scratch("files");
    let path = root.clone();
    run(move |handle| async move {
        let disk = handle.disk(&path, true).expect("statvfs works");
        let block = disk.block_bytes();
        disk.create_dir(&path.join("a")).await.expect("mkdir");
        disk.create_dir(&path.join("a")).await.expect("an existing directory is no error");
        let name = path.join("a/log");
        let file = disk.open(&name, Open::New, Caching::Direct).await.expect("create");
        disk.sync_dir(&path.join("a")).await.expect("sync directory");
        file.allocate(0, 8 * block as u64).await.expect("fallocate");
        assert_eq!(file.len().await.expect("statx"), 8 * block as u64);

        let mut buf = AlignedBuf::zeroed(2 * block);
        buf[..2 * block].fill(7);
        buf.truncate(2 * block);
        file.write_durable_at(block as u64, buf.freeze()).await.expect("durable write");
        let read = file.read_at(0, 4 * block).await.expect("read");
        assert!(read[..block].iter().all(|b| *b == 0) && read[block..3 * block].iter().all(|b| *b == 7));

        let past = file.read_at(7 * block as u64, 2 * block).await.expect_err("past the end");
        assert_eq!(past.kind(), std::io::ErrorKind::UnexpectedEof);
        let odd = file.write_at(1, Slice::copy_from(b"x")).await.expect_err("not whole blocks");
        assert_eq!(odd.kind(), std::io::ErrorKind::InvalidInput);

        file.set_len(block as u64).await.expect("ftruncate");
        file.sync_data().await.expect("fdatasync");
        assert_eq!(file.len().await.expect("statx"), block as u64);

        disk.rename(&name, &path.join("a/renamed")).await.expect("rename");
        let entries = disk.list(&path.join("a")).await.expect("list");
        assert_eq!(
            entries.iter().map(|e| (e.name.to_str(), e.bytes)).collect::<Vec<_>>(),
            [(Some("renamed"), block as u64)]
        );
        disk.remove_file(&path.join("a/renamed")).await.expect("unlink");
        let missing = disk.open(&name, Open::Existing, Caching::Direct).await.err().expect("it is gone");
        assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
        assert!(missing.to_string().contains("a/log"), "{missing}");
        assert!(disk.available_bytes().await.expect("statvfs") > 0);
        disk.remove_dir_all(&path.join("a")).await.expect("remove");
        let gone = disk.list(&path.join("a")).await.expect_err("it is gone");
        assert_eq!(gone.kind(), std::io::ErrorKind::NotFound);
    });
    std::fs::remove_dir_all(&root).expect("scratch can be removed");
}

#[test]
fn s2_files_are_private() {
    use std::os::unix::fs::PermissionsExt;
    let root = scratch("private");
    let path = root.clone();
    run(move |handle| async move {
        let disk = handle.disk(&path, false).expect("statvfs works");
        disk.create_dir(&path.join("d")).await.expect("mkdir");
        disk.open(&path.join("d/f"), Open::Create, Caching::Buffered).await.expect("create");
    });
    let mode = |name: &str| std::fs::metadata(root.join(name)).expect("it exists").permissions().mode() & 0o777;
    assert_eq!((mode("d"), mode("d/f")), (0o700, 0o600));
    std::fs::remove_dir_all(&root).expect("scratch can be removed");
}

#[test]
fn small_files_take_any_offset_and_length() {
    let root = scratch("small");
    let path = root.clone();
    run(move |handle| async move {
        let disk = handle.disk(&path, true).expect("statvfs works");
        let file = disk.open(&path.join("f"), Open::Create, Caching::Buffered).await.expect("create");
        file.write_durable_at(3, Slice::copy_from(b"hello")).await.expect("write");
        assert_eq!(&file.read_at(4, 3).await.expect("read")[..], b"ell");
        let end = file.read_at(4, 5).await.expect_err("one byte too many");
        assert_eq!(end.kind(), std::io::ErrorKind::UnexpectedEof);
    });
    std::fs::remove_dir_all(&root).expect("scratch can be removed");
}

#[test]
fn lesson_u7_a_dropped_write_still_lands_whole() {
    let root = scratch("dropped");
    let path = root.clone();
    run(move |handle| async move {
        let disk = handle.disk(&path, true).expect("statvfs works");
        let file = disk.open(&path.join("f"), Open::New, Caching::Direct).await.expect("create");
        for round in 0..64u64 {
            let mut buf = AlignedBuf::zeroed(4096);
            buf.fill(round as u8 + 1);
            let write = file.write_durable_at(round * 4096, buf.freeze());
            // Polled once, then dropped together with the last reference to its memory that the caller has.
            let gone = rt::timeout(Duration::ZERO, write).await;
            assert!(gone.is_err());
            drop(AlignedBuf::zeroed(4096));
        }
        loop {
            rt::sleep(Duration::from_millis(2)).await;
            if handle.metrics().ring_depth == 0 {
                break;
            }
        }
        let read = file.read_at(0, 64 * 4096).await.expect("read");
        for (block, round) in read.chunks(4096).zip(1u8..) {
            assert!(block.iter().all(|b| *b == round), "block {round}");
        }
    });
    std::fs::remove_dir_all(&root).expect("scratch can be removed");
}

#[test]
fn e26_what_does_not_fit_memlock_is_plain_memory() {
    let root = scratch("memlock");
    let path = root.clone();
    run(move |handle| async move {
        let mut pool = ChunkPool::new(64 << 10, 8);
        let registered = handle.register_chunks(&mut pool, 8);
        assert!(registered <= 4, "the budget of the test's ring is 256 KiB");
        assert_eq!(handle.registered_bytes(), registered as u64 * (64 << 10));
        let disk = handle.disk(&path, true).expect("statvfs works");
        let file = disk.open(&path.join("f"), Open::New, Caching::Direct).await.expect("create");
        let chunks: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(chunks.len(), 8);
        for (mut chunk, at) in chunks.into_iter().zip(0u64..) {
            chunk.fill(at as u8 + 1);
            let slice = chunk.freeze();
            file.write_durable_at(at * 8192, slice.slice(4096..12288)).await.expect("write");
        }
        let read = file.read_at(0, 8 * 8192).await.expect("read");
        for (part, at) in read.chunks(8192).zip(1u8..) {
            assert!(part.iter().all(|b| *b == at));
        }
    });
    std::fs::remove_dir_all(&root).expect("scratch can be removed");
}

#[test]
fn lesson_u6_operations_in_flight_never_overflow_the_completion_queue() {
    let root = scratch("overflow");
    let path = root.clone();
    run(move |handle| async move {
        let disk = handle.disk(&path, true).expect("statvfs works");
        let file = disk.open(&path.join("f"), Open::New, Caching::Buffered).await.expect("create");
        let data = Slice::copy_from(&[1; 512]);
        let tasks: Vec<_> = (0..10_000u64)
            .map(|i| {
                let (file, data) = (file.clone(), data.clone());
                rt::spawn(Queue::Foreground, async move { file.write_at(i * 512, data).await })
            })
            .collect();
        for task in tasks {
            task.await.expect("write");
        }
        let metrics = handle.metrics();
        assert_eq!(metrics.cq_overflow, 0);
        assert!(metrics.completions >= 10_000 && metrics.ring_depth == 0, "{metrics:?}");
    });
    std::fs::remove_dir_all(&root).expect("scratch can be removed");
}

#[test]
fn an_idle_runtime_does_not_enter_the_kernel() {
    let enters = run(|handle| async move {
        rt::sleep(Duration::from_millis(20)).await;
        let before = handle.metrics().enters;
        rt::sleep(Duration::from_millis(200)).await;
        handle.metrics().enters - before
    });
    assert!(enters <= 3, "{enters} enters in an idle time of 200 ms");
}

/// Lesson S3: what a shard spins for is its drive at work, never a request to come.
#[test]
fn s3_a_shard_polls_while_its_drive_works_and_never_when_idle() {
    let root = scratch("poll");
    let path = root.clone();
    let mut options = Options::new("test");
    options.cpu = crate::io::system::allowed_cpus().ok().and_then(|cpus| cpus.first().map(|cpu| *cpu as usize));
    options.spin = Spin::ForDrive(Duration::from_secs(1));
    let polled = run_shard_thread(options, |handle| async move {
        rt::sleep(Duration::from_millis(100)).await;
        let idle = handle.metrics().poll_nanos;
        let disk = handle.disk(&path, false).expect("statvfs works");
        let file = disk.open(&path.join("f"), Open::Create, Caching::Buffered).await.expect("create");
        for at in 0..16 {
            file.write_durable_at(at, Slice::copy_from(b"x")).await.expect("write");
        }
        let working = handle.metrics().poll_nanos;
        rt::sleep(Duration::from_millis(100)).await;
        (idle, working - idle, handle.metrics().poll_nanos - working)
    });
    let (before, working, after) = polled.expect("the test machine has io_uring");
    assert_eq!((before, after), (0, 0));
    assert!(working > 0);
    std::fs::remove_dir_all(&root).expect("scratch can be removed");
}

/// Runs this test binary again, with only the test `name` and `NARAD_TEST_DIES` set: that run is the one to die.
fn die_in_another_process(name: &str) -> std::process::Output {
    let exe = std::env::current_exe().expect("the test binary has a path");
    std::process::Command::new(exe)
        .args([name, "--exact", "--nocapture", "--test-threads=1"])
        .env("NARAD_TEST_DIES", "1")
        .output()
        .expect("the test binary can be started")
}

#[test]
fn e25_a_panic_in_a_task_takes_the_process_down_with_the_reason_last() {
    if std::env::var_os("NARAD_TEST_DIES").is_some() {
        let _ = run_shard_thread(Options::new("shard 3"), |_| async {
            rt::spawn(Queue::Foreground, async { panic!("the ledger does not add up") });
            rt::sleep(Duration::from_secs(60)).await;
        });
        return;
    }
    let output =
        die_in_another_process("rt::ring_tests::e25_a_panic_in_a_task_takes_the_process_down_with_the_reason_last");
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(output.status.signal(), Some(libc::SIGABRT));
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let last = text.lines().last().unwrap_or_default();
    assert_eq!(last, "narad: panic on shard thread shard 3: the ledger does not add up; the process stops");
}

/// Counts the polls of a task that wakes itself in its first one, and forgets that or not.
fn polls_until_woken(forget: bool, others: usize) -> u32 {
    run(move |_| async move {
        let (polls, done): (Rc<Cell<u32>>, Rc<Cell<bool>>) = Default::default();
        let waker: Rc<Cell<Option<std::task::Waker>>> = Rc::default();
        let (count, end, slot) = (polls.clone(), done.clone(), waker.clone());
        let task = rt::spawn(
            Queue::Foreground,
            std::future::poll_fn(move |cx| {
                count.set(count.get() + 1);
                if end.get() {
                    return Poll::Ready(());
                }
                slot.set(Some(cx.waker().clone()));
                if count.get() == 1 {
                    assert!(!rt::is_woken());
                    cx.waker().wake_by_ref();
                    assert!(rt::is_woken());
                    if forget {
                        rt::forget_wake();
                        assert!(!rt::is_woken());
                    }
                }
                Poll::Pending
            }),
        );
        for _ in 0..others {
            rt::spawn(Queue::Foreground, rt::yield_now());
        }
        rt::sleep(Duration::from_millis(5)).await;
        done.set(true);
        waker.take().expect("it was polled").wake();
        task.await;
        polls.get()
    })
}

#[test]
fn a_wake_that_is_taken_back_polls_nobody_and_a_later_one_does() {
    for others in [0, 3] {
        assert_eq!(polls_until_woken(false, others), 3);
        assert_eq!(polls_until_woken(true, others), 2);
    }
}

#[test]
fn what_follows_a_submission_runs_after_everything_that_was_runnable() {
    let order = run(|_| async {
        let log: Rc<std::cell::RefCell<Vec<u32>>> = Rc::default();
        let write = |number: u32| {
            let log = log.clone();
            move || log.borrow_mut().push(number)
        };
        let (early, late, last) = (write(1), write(2), write(3));
        let tasks = [
            rt::spawn(Queue::Foreground, async move {
                rt::submitted().await;
                last();
            }),
            rt::spawn(Queue::Foreground, async move {
                early();
                rt::yield_now().await;
                late();
            }),
        ];
        for task in tasks {
            task.await;
        }
        log.take()
    });
    assert_eq!(order, [1, 2, 3]);
}

#[test]
fn e25_a_contained_panic_leaves_the_shard_alive() {
    let outcome = run(|_| async {
        let outcome = rt::contain(async { panic!("a handler") }).await;
        rt::sleep(Duration::from_millis(1)).await;
        outcome.map(|never: std::convert::Infallible| match never {})
    });
    assert_eq!(outcome, Err("a handler".to_owned()));
}

#[test]
fn lesson_p1_a_core_that_is_not_ours_is_refused_by_name() {
    let mut options = Options::new("test");
    options.cpu = Some(1_000);
    let error = run_shard_thread(options, |_| async {}).expect_err("no test machine lets us use CPU 1000");
    assert!(error.to_string().contains("CPU 1000"), "{error}");
}

#[test]
fn e12_the_ring_holds_the_lock_after_its_descriptor_is_closed() {
    use std::os::fd::{AsFd, AsRawFd};
    let root = scratch("lock");
    let path = root.join("LOCK");
    let open = move || std::fs::File::options().create(true).append(true).open(&path).expect("scratch is writable");
    let try_lock = |file: &std::fs::File| {
        // SAFETY: plain system call on an open descriptor.
        unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
    };
    let (inside, outside) = (open.clone(), open());
    run(move |handle| async move {
        let held = inside();
        assert!(try_lock(&held));
        handle.hold_lock(held.as_fd()).expect("one file fits the table");
        drop(held);
        assert!(!try_lock(&inside()), "the descriptor is closed, the ring is not");
    });
    // The kernel tears a ring down on a worker of its own.
    while !try_lock(&outside) {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::fs::remove_dir_all(&root).expect("scratch can be removed");
}
