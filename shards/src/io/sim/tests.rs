use super::*;
use crate::io::AlignedBuf;
use crate::rt::sim::{run, Rng, Sim};
use std::collections::BTreeSet;

const BLOCK: usize = 4096;

fn block(fill: u8) -> Slice {
    blocks(fill, 1)
}

fn blocks(fill: u8, count: usize) -> Slice {
    let mut buf = AlignedBuf::zeroed(count * BLOCK);
    buf.fill(fill);
    buf.freeze()
}

fn path(text: &str) -> &Path {
    Path::new(text)
}

async fn create(disk: &SimDisk, name: &str) -> SimFile {
    let file = disk.open(path(name), Open::Create, Caching::Direct).await.expect("no fault is injected");
    disk.sync_dir(path("/")).await.expect("no fault is injected");
    file
}

/// A file of `count` durable blocks of ones.
async fn prepared(disk: &SimDisk, name: &str, count: usize) -> SimFile {
    let file = create(disk, name).await;
    file.write_at(0, blocks(1, count), Durability::Synced).await.expect("no fault is injected");
    file
}

/// The set of outcomes that many seeds of one scenario give.
fn outcomes<T: Ord + 'static>(seeds: u64, scenario: impl Fn(SimDisk, Sim) -> LocalFuture<T>) -> BTreeSet<T> {
    (0..seeds)
        .map(|seed| {
            let sim = Sim::new(seed);
            sim.run(scenario(SimDisk::new(seed), sim.clone()))
        })
        .collect()
}

type LocalFuture<T> = std::pin::Pin<Box<dyn std::future::Future<Output = T>>>;

fn fills(content: &[u8]) -> Vec<u8> {
    content.chunks(512).map(|sector| sector[0]).collect()
}

#[test]
fn e15_an_unsynced_write_survives_in_any_subset_of_its_sectors() {
    let seen = outcomes(300, |disk, _| {
        Box::pin(async move {
            let file = prepared(&disk, "/a", 1).await;
            file.write_at(0, block(2), Durability::Cached).await.expect("no fault");
            disk.power_cut();
            let content = disk.peek(path("/a")).expect("synced");
            assert!(content.chunks(512).all(|sector| sector.iter().all(|byte| *byte == sector[0])), "torn in a sector");
            fills(&content)
        })
    });
    assert!(seen.contains(&vec![1; 8]) && seen.contains(&vec![2; 8]) && seen.len() > 20, "{}", seen.len());
    assert!(seen.iter().flatten().all(|fill| matches!(fill, 1 | 2)));
}

#[test]
fn a_durable_write_covers_its_own_range_and_no_other() {
    let seen = outcomes(100, |disk, _| {
        Box::pin(async move {
            let file = prepared(&disk, "/a", 2).await;
            file.write_at(0, block(2), Durability::Cached).await.expect("no fault");
            file.write_at(4096, block(3), Durability::Synced).await.expect("no fault");
            assert_eq!(fills(&disk.peek_durable(path("/a")).expect("synced"))[8..], [3; 8]);
            disk.power_cut();
            let content = fills(&disk.peek(path("/a")).expect("synced"));
            assert_eq!(content[8..], [3; 8]);
            content[..8].to_vec()
        })
    });
    assert!(seen.contains(&vec![1; 8]) && seen.contains(&vec![2; 8]));
}

#[test]
fn sync_data_covers_completed_writes_and_the_length() {
    outcomes(50, |disk, _| {
        Box::pin(async move {
            let file = create(&disk, "/a").await;
            file.write_at(0, blocks(2, 3), Durability::Cached).await.expect("no fault");
            file.sync_data().await.expect("no fault");
            disk.power_cut();
            assert_eq!(disk.peek(path("/a")).expect("synced"), vec![2; 3 * BLOCK]);
        })
    });
}

#[test]
fn rewritten_sectors_may_keep_any_content_since_the_last_sync() {
    let seen = outcomes(300, |disk, _| {
        Box::pin(async move {
            let file = prepared(&disk, "/a", 1).await;
            for fill in 2..5 {
                file.write_at(0, block(fill), Durability::Cached).await.expect("no fault");
            }
            disk.power_cut();
            disk.peek(path("/a")).expect("synced")[0]
        })
    });
    assert_eq!(seen, BTreeSet::from([1, 2, 3, 4]));
}

#[test]
fn e1_an_entry_survives_only_if_its_directory_was_synced() {
    let seen = outcomes(100, |disk, _| {
        Box::pin(async move {
            disk.create_dir(path("/d")).await.expect("no fault");
            disk.sync_dir(path("/")).await.expect("no fault");
            let kept = disk.open(path("/d/kept"), Open::New, Caching::Buffered).await.expect("no fault");
            kept.write_at(0, Slice::copy_from(b"x"), Durability::Synced).await.expect("no fault");
            disk.sync_dir(path("/d")).await.expect("no fault");
            let lost = disk.open(path("/d/lost"), Open::New, Caching::Buffered).await.expect("no fault");
            lost.write_at(0, Slice::copy_from(b"y"), Durability::Synced).await.expect("no fault");
            disk.power_cut();
            assert_eq!(disk.peek(path("/d/kept")).expect("synced"), b"x");
            disk.peek(path("/d/lost"))
        })
    });
    assert_eq!(seen, BTreeSet::from([None, Some(b"y".to_vec())]));
}

#[test]
fn e1_nothing_below_a_directory_survives_without_the_directory() {
    let seen = outcomes(60, |disk, _| {
        Box::pin(async move {
            disk.create_dir(path("/d")).await.expect("no fault");
            disk.open(path("/d/f"), Open::New, Caching::Buffered).await.expect("no fault");
            disk.sync_dir(path("/d")).await.expect("no fault");
            disk.power_cut();
            disk.files().len()
        })
    });
    assert_eq!(seen, BTreeSet::from([0, 1]));
}

#[test]
fn a_rename_is_kept_or_lost_as_a_whole() {
    let seen = outcomes(100, |disk, _| {
        Box::pin(async move {
            prepared(&disk, "/old", 1).await;
            disk.rename(path("/old"), path("/new")).await.expect("no fault");
            disk.power_cut();
            disk.files()
        })
    });
    assert_eq!(seen, BTreeSet::from([vec![PathBuf::from("/old")], vec![PathBuf::from("/new")]]));
}

#[test]
fn a_rename_into_another_directory_never_loses_the_file() {
    let seen = outcomes(200, |disk, _| {
        Box::pin(async move {
            prepared(&disk, "/old", 1).await;
            disk.create_dir(path("/d")).await.expect("no fault");
            disk.sync_dir(path("/")).await.expect("no fault");
            disk.rename(path("/old"), path("/d/new")).await.expect("no fault");
            disk.power_cut();
            disk.files().len()
        })
    });
    assert_eq!(seen, BTreeSet::from([1, 2]));
}

#[test]
fn a_removal_may_be_undone_and_one_entry_keeps_its_order() {
    let seen = outcomes(200, |disk, _| {
        Box::pin(async move {
            prepared(&disk, "/a", 1).await;
            disk.remove_file(path("/a")).await.expect("no fault");
            let again = disk.open(path("/a"), Open::New, Caching::Direct).await.expect("no fault");
            again.write_at(0, block(7), Durability::Synced).await.expect("no fault");
            disk.power_cut();
            disk.peek(path("/a")).map(|content| content[0])
        })
    });
    // Never an empty second file: its content was durable before the cut.
    assert_eq!(seen, BTreeSet::from([None, Some(1), Some(7)]));
}

#[test]
fn a_shrink_is_kept_or_lost_with_what_it_removed() {
    let seen = outcomes(300, |disk, _| {
        Box::pin(async move {
            let file = disk.open(path("/hwm"), Open::New, Caching::Buffered).await.expect("no fault");
            disk.sync_dir(path("/")).await.expect("no fault");
            file.write_at(0, Slice::copy_from(b"12345678"), Durability::Synced).await.expect("no fault");
            file.set_len(0).await.expect("no fault");
            file.write_at(0, Slice::copy_from(b"abc"), Durability::Cached).await.expect("no fault");
            disk.power_cut();
            String::from_utf8(disk.peek(path("/hwm")).expect("synced")).expect("text")
        })
    });
    let expected = ["12345678", "", "abc", "\0\0\0"].map(str::to_owned);
    assert_eq!(seen, BTreeSet::from(expected));
}

#[test]
fn a_synced_shrink_removes_for_good() {
    outcomes(50, |disk, _| {
        Box::pin(async move {
            let file = prepared(&disk, "/a", 4).await;
            file.set_len(BLOCK as u64).await.expect("no fault");
            file.sync_data().await.expect("no fault");
            file.set_len(2 * BLOCK as u64).await.expect("no fault");
            file.sync_data().await.expect("no fault");
            disk.power_cut();
            let content = disk.peek(path("/a")).expect("synced");
            assert_eq!((content.len(), content[0], content[BLOCK]), (2 * BLOCK, 1, 0));
        })
    });
}

#[test]
fn a_killed_process_leaves_completed_writes_visible() {
    outcomes(50, |disk, _| {
        Box::pin(async move {
            let file = prepared(&disk, "/a", 1).await;
            file.write_at(0, block(2), Durability::Cached).await.expect("no fault");
            disk.process_crash();
            assert_eq!(disk.peek(path("/a")).expect("synced"), vec![2; BLOCK]);
            let stale = file.read_at(0, BLOCK).await.expect_err("the handle died with its process");
            assert!(stale.to_string().contains("crashed"));
        })
    });
}

#[test]
fn e12_a_write_in_flight_at_a_kill_lands_wholly_in_part_not_or_later() {
    let seen = outcomes(400, |disk, sim| {
        Box::pin(async move {
            prepared(&disk, "/a", 1).await;
            let theirs = disk.clone();
            sim.spawn_on(5, async move {
                let file = theirs.open(path("/a"), Open::Existing, Caching::Direct).await.expect("no fault");
                theirs.inject(NthCall::new(Op::Write, 1, Fault::Stall(Duration::from_secs(1))));
                drop(file.write_at(0, block(2), Durability::Cached).await);
            });
            rt::sleep(Duration::from_millis(100)).await;
            sim.kill(5);
            disk.process_crash();
            let at_once = fills(&disk.peek(path("/a")).expect("synced"));
            rt::sleep(Duration::from_millis(10)).await;
            let later = fills(&disk.peek(path("/a")).expect("synced"));
            let part = |content: &[u8]| content.contains(&1) && content.contains(&2);
            (at_once[0] == 2 && !part(&at_once), part(&later), later == vec![2; 8], at_once != later)
        })
    });
    assert!(seen.contains(&(true, false, true, false)), "wholly, at once");
    assert!(seen.iter().any(|(_, part, _, _)| *part), "in part");
    assert!(seen.contains(&(false, false, false, false)), "not");
    assert!(seen.contains(&(false, false, true, true)), "later");
}

#[test]
fn lesson_u7_a_dropped_write_still_happens_and_holds_its_memory() {
    run(3, async {
        let disk = SimDisk::new(3);
        let file = prepared(&disk, "/a", 1).await;
        let data = block(2);
        disk.inject(NthCall::new(Op::WriteDurable, 1, Fault::Stall(Duration::from_secs(1))));
        let write = file.write_at(0, data.clone(), Durability::Synced);
        assert!(rt::timeout(Duration::from_millis(1), write).await.is_err());
        let data = data.try_into_mut().err().expect("the kernel still reads from it");
        rt::sleep(Duration::from_secs(2)).await;
        assert!(data.try_into_mut().is_ok(), "released once the write was over, though nobody asked the disk since");
        assert_eq!(disk.peek_durable(path("/a")).expect("synced"), vec![2; BLOCK]);
    });
}

#[test]
fn n8_a_failed_sync_drops_data_and_the_next_one_says_ok() {
    let seen = outcomes(60, |disk, _| {
        Box::pin(async move {
            let file = prepared(&disk, "/a", 1).await;
            file.write_at(0, block(2), Durability::Cached).await.expect("no fault");
            disk.inject(NthCall::new(Op::SyncData, 1, Fault::Fail));
            let error = file.sync_data().await.expect_err("injected");
            assert_eq!(error.raw_os_error(), Some(libc::EIO));
            file.sync_data().await.expect("clean again");
            disk.power_cut_as(Survival::Everything);
            fills(&disk.peek(path("/a")).expect("synced")).contains(&1)
        })
    });
    assert_eq!(seen, BTreeSet::from([false, true]));
}

#[test]
fn a_lying_sync_makes_nothing_durable_and_is_on_record() {
    run(1, async {
        let disk = SimDisk::new(1);
        let file = prepared(&disk, "/a", 2).await;
        disk.inject(NthCall::new(Op::WriteDurable, 1, Fault::Lie).on("a"));
        file.write_at(0, block(2), Durability::Synced).await.expect("it lies");
        assert_eq!(file.read_at(0, BLOCK).await.expect("no fault")[0], 2);
        file.write_at(BLOCK as u64, block(3), Durability::Synced).await.expect("honest");
        disk.power_cut_as(Survival::Nothing);
        assert_eq!(fills(&disk.peek(path("/a")).expect("synced"))[..9], [1, 1, 1, 1, 1, 1, 1, 1, 3]);
        let lie = Incident::Lied { path: "/a".into(), op: Op::WriteDurable, offset: 0, bytes: 4096 };
        assert_eq!(disk.incidents().into_iter().map(|(_, incident)| incident).collect::<Vec<_>>(), [lie]);
    });
}

#[test]
fn the_nth_matching_call_fails_and_no_other() {
    run(1, async {
        let disk = SimDisk::new(1);
        let (a, b) = (prepared(&disk, "/a", 4).await, prepared(&disk, "/b", 4).await);
        disk.inject(NthCall::new(Op::Read, 2, Fault::Fail).on("/a").times(2));
        let mut results = Vec::new();
        for _ in 0..4 {
            results.push((a.read_at(0, BLOCK).await.is_ok(), b.read_at(0, BLOCK).await.is_ok()));
        }
        assert_eq!(results, [(true, true), (false, true), (false, true), (true, true)]);
        disk.inject(NthCall::new(Op::WriteDurable, 1, Fault::Short));
        let short = a.write_at(0, blocks(9, 4), Durability::Synced).await.expect_err("injected");
        assert_eq!(short.kind(), io::ErrorKind::WriteZero);
        let content = fills(&disk.peek(path("/a")).expect("synced"));
        let prefix = content.iter().take_while(|fill| **fill == 9).count();
        assert!(prefix < content.len() && content[prefix..].iter().all(|fill| *fill == 1));
        assert_eq!(disk.peek_durable(path("/a")).expect("synced"), vec![1; 4 * BLOCK]);
        disk.inject(NthCall::new(Op::Write, 1, Fault::Skip));
        a.write_at(0, block(5), Durability::Cached).await.expect("it lies");
        assert_ne!(disk.peek(path("/a")).expect("synced")[0], 5);
    });
}

#[test]
fn a_full_disk_refuses_and_keeps_claimed_blocks_usable() {
    run(2, async {
        let disk = SimDisk::with(2, DiskOptions { capacity_bytes: Some(10 * BLOCK as u64), ..Default::default() });
        let claimed = create(&disk, "/claimed").await;
        claimed.allocate(0, 6 * BLOCK as u64).await.expect("fits");
        assert_eq!(disk.available_bytes().await.expect("no fault"), 4 * BLOCK as u64);
        let error = claimed.allocate(0, 11 * BLOCK as u64).await.expect_err("too much");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        let other = create(&disk, "/other").await;
        let error = other.write_at(0, blocks(1, 5), Durability::Synced).await.expect_err("too much");
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        other.set_len(0).await.expect("no fault");
        other.write_at(0, blocks(1, 4), Durability::Synced).await.expect("fits");
        claimed.write_at(0, blocks(2, 6), Durability::Synced).await.expect("its blocks were claimed");
        assert!(disk.open(path("/third"), Open::New, Caching::Direct).await.is_err());
        disk.remove_file(path("/other")).await.expect("no fault");
        assert_eq!(disk.used_bytes(), 10 * BLOCK as u64, "still open");
        drop(other);
        assert_eq!(disk.used_bytes(), 6 * BLOCK as u64);
    });
}

#[test]
fn a_direct_file_refuses_what_the_kernel_refuses() {
    run(1, async {
        let disk = SimDisk::new(1);
        let file = prepared(&disk, "/a", 2).await;
        let shifted = blocks(1, 2).slice(512..512 + BLOCK);
        for result in [
            file.read_at(1, BLOCK).await.map(drop),
            file.read_at(0, BLOCK - 1).await.map(drop),
            file.write_at(512, block(1), Durability::Cached).await,
            file.write_at(0, block(1).slice(0..512), Durability::Cached).await,
            file.write_at(0, shifted, Durability::Cached).await,
        ] {
            assert_eq!(result.expect_err("not aligned").kind(), io::ErrorKind::InvalidInput);
        }
        let behind = file.read_at(BLOCK as u64, 2 * BLOCK).await.expect_err("the file ends before");
        assert_eq!(behind.kind(), io::ErrorKind::UnexpectedEof);
        let small = disk.open(path("/s"), Open::New, Caching::Buffered).await.expect("no fault");
        small.write_at(3, Slice::copy_from(b"abc"), Durability::Cached).await.expect("any offset");
        assert_eq!(&small.read_at(0, 6).await.expect("no fault")[..], b"\0\0\0abc");
    });
}

#[test]
fn a_read_that_races_a_write_may_see_any_mixture() {
    let seen = outcomes(100, |disk, _| {
        Box::pin(async move {
            let file = Rc::new(prepared(&disk, "/a", 1).await);
            disk.inject(NthCall::new(Op::Write, 1, Fault::Stall(Duration::from_millis(10))));
            let theirs = file.clone();
            let write =
                rt::spawn(rt::Queue::Foreground, async move { theirs.write_at(0, block(2), Durability::Cached).await });
            rt::sleep(Duration::from_millis(1)).await;
            let content = fills(&file.read_at(0, BLOCK).await.expect("no fault"));
            write.await.expect("no fault");
            assert_eq!(fills(&file.read_at(0, BLOCK).await.expect("no fault")), [2; 8]);
            content.contains(&1) && content.contains(&2)
        })
    });
    assert!(seen.contains(&true));
}

#[test]
fn rot_flips_one_durable_bit() {
    run(4, async {
        let disk = SimDisk::new(4);
        prepared(&disk, "/a", 1).await;
        prepared(&disk, "/b", 1).await;
        let (rotten, offset) = disk.rot("b").expect("one file matches");
        assert_eq!(rotten, path("/b"));
        for content in [disk.peek(&rotten), disk.peek_durable(&rotten)].into_iter().flatten() {
            let flipped: u32 = content.iter().map(|byte| (byte ^ 1).count_ones()).sum();
            assert!(flipped == 1 && content[offset as usize] != 1);
        }
        assert!(disk.flip_bit(path("/a"), 17, 3) && !disk.flip_bit(path("/a"), 1 << 20, 3));
        assert_eq!(disk.incidents().len(), 2);
    });
}

#[test]
fn s61_a_frozen_disk_starts_no_further_call() {
    run(5, async {
        let disk = SimDisk::new(5);
        let file = prepared(&disk, "/a", 1).await;
        let before = disk.calls();
        disk.freeze_after(2);
        let work = async {
            for fill in 2..9 {
                file.write_at(0, block(fill), Durability::Synced).await.expect("no fault");
            }
        };
        assert!(rt::timeout(Duration::from_secs(60), work).await.is_err());
        assert_eq!(disk.frozen_at().map(|at| at < rt::now()), Some(true), "the third call hung, a minute ago");
        assert_eq!((disk.calls() - before, disk.peek_durable(path("/a")).expect("synced")[0]), (3, 3));
        disk.power_cut();
        disk.clear_faults();
        assert_eq!(disk.frozen_at(), None);
        let again = disk.open(path("/a"), Open::Existing, Caching::Direct).await.expect("thawed");
        assert!(matches!(again.read_at(0, BLOCK).await.expect("thawed")[0], 3 | 4));
    });
}

#[test]
fn e1_a_name_is_durable_once_every_directory_on_its_path_was_synced() {
    run(6, async {
        let disk = SimDisk::new(6);
        disk.create_dir(path("/d")).await.expect("no fault");
        disk.open(path("/d/a"), Open::New, Caching::Buffered).await.expect("no fault");
        assert!(!disk.is_name_durable(path("/d/a")));
        disk.sync_dir(path("/d")).await.expect("no fault");
        assert!(!disk.is_name_durable(path("/d/a")), "its directory may go");
        disk.sync_dir(path("/")).await.expect("no fault");
        assert!(disk.is_name_durable(path("/d/a")));
        disk.rename(path("/d/a"), path("/d/b")).await.expect("no fault");
        assert!(!disk.is_name_durable(path("/d/a")) && !disk.is_name_durable(path("/d/b")));
    });
}

#[test]
fn chances_apply_to_their_own_kind_of_call() {
    run(7, async {
        let disk = SimDisk::new(7);
        let file = prepared(&disk, "/a", 1).await;
        disk.set_rates(FaultRates { write_fail: 250_000, lie: 250_000, ..Default::default() });
        let (mut failed, mut lies) = (0, 0);
        for _ in 0..400 {
            failed += u32::from(file.write_at(0, block(1), Durability::Synced).await.is_err());
            file.read_at(0, BLOCK).await.expect("reads have no chance to fail");
        }
        lies += disk.incidents().len();
        assert!((60..140).contains(&failed) && (60..140).contains(&lies), "{failed} {lies}");
        disk.clear_faults();
        disk.set_rates(FaultRates { stall: 1_000_000, stall_ms_max: 900, ..Default::default() });
        let start = rt::now();
        file.read_at(0, BLOCK).await.expect("only late");
        assert!(rt::now() - start >= Duration::from_millis(1));
    });
}

#[test]
fn time_scales_with_slowness() {
    let took = |slowness| {
        run(8, async move {
            let disk = SimDisk::new(8);
            disk.set_slowness(slowness);
            disk.open(path("/a"), Open::New, Caching::Direct).await.expect("no fault");
            rt::now()
        })
    };
    let start = Duration::from_secs(1);
    let since_start = |slowness| Duration::from_nanos(took(slowness).0) - start;
    assert_eq!(since_start(1000), since_start(1) * 1000);
}

#[test]
fn calls_complete_out_of_order_and_by_seed() {
    let order = |seed| {
        run(seed, async move {
            let disk = SimDisk::new(seed);
            let done: Rc<RefCell<Vec<u32>>> = Rc::default();
            let tasks: Vec<_> = (0..8)
                .map(|i| {
                    let (disk, done) = (disk.clone(), done.clone());
                    rt::spawn(rt::Queue::Foreground, async move {
                        disk.open(path(&format!("/{i}")), Open::New, Caching::Direct).await.expect("no fault");
                        done.borrow_mut().push(i);
                    })
                })
                .collect();
            for task in tasks {
                task.await;
            }
            let order = done.borrow().clone();
            (order, disk.trace())
        })
    };
    assert_eq!(order(1), order(1));
    assert_ne!(order(1).0, order(2).0);
    assert_eq!(order(1).1.lines().count(), 8);
}

#[test]
fn remove_dir_all_takes_everything_below() {
    run(6, async {
        let disk = SimDisk::new(6);
        for directory in ["/t", "/t/p0", "/t/p1"] {
            disk.create_dir(path(directory)).await.expect("no fault");
        }
        for file in ["/t/m", "/t/p0/a", "/t/p1/b", "/u"] {
            disk.open(path(file), Open::New, Caching::Buffered).await.expect("no fault");
        }
        let names = |entries: Vec<Entry>| entries.into_iter().map(|e| (e.name, e.directory)).collect::<Vec<_>>();
        let listed = names(disk.list(path("/t")).await.expect("exists"));
        assert_eq!(listed, [("m".into(), false), ("p0".into(), true), ("p1".into(), true)]);
        assert!(disk.remove_file(path("/t/p0")).await.is_err(), "a directory");
        disk.remove_dir_all(path("/t")).await.expect("no fault");
        assert_eq!(names(disk.list(path("/")).await.expect("exists")), [("u".into(), false)]);
    });
}

/// Any sequence of writes, shrinks and syncs: after a cut each byte is one that it once had since the last sync.
#[test]
fn random_histories_leave_only_contents_that_once_were() {
    for seed in 0..300 {
        run(seed, async move {
            let disk = SimDisk::new(seed);
            let mut rng = Rng::new(seed);
            let file = disk.open(path("/f"), Open::New, Caching::Buffered).await.expect("no fault");
            disk.sync_dir(path("/")).await.expect("no fault");
            let mut history: Vec<Vec<u8>> = vec![Vec::new()];
            for step in 0..rng.range(1, 12) {
                match rng.below(6) {
                    0 => {
                        file.sync_data().await.expect("no fault");
                        history = vec![disk.peek(path("/f")).expect("synced")];
                        assert_eq!(disk.peek_durable(path("/f")), disk.peek(path("/f")));
                    }
                    1 => file.set_len(rng.below(3000)).await.expect("no fault"),
                    durable => {
                        let data = vec![step as u8 + 1; rng.range(1, 1500) as usize];
                        let durability = if durable == 2 { Durability::Synced } else { Durability::Cached };
                        file.write_at(rng.below(2000), Slice::copy_from(&data), durability).await.expect("no fault");
                    }
                }
                history.push(disk.peek(path("/f")).expect("synced"));
            }
            disk.power_cut();
            let content = disk.peek(path("/f")).expect("synced");
            assert!(history.iter().any(|past| past.len() == content.len()), "seed {seed}: a length it never had");
            for (at, byte) in content.iter().enumerate() {
                let known = *byte == 0 || history.iter().any(|past| past.get(at) == Some(byte));
                assert!(known, "seed {seed}: byte {at} is {byte}, which it never was");
            }
        });
    }
}
