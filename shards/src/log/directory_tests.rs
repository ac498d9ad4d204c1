//! Markers, quarantine and inventory of topic directories.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::directory::{DirectoryError, Mark, Marker, Retire, TopicDirectories, TopicKind};
use crate::io::sim::SimDisk;
use crate::io::{Caching, Disk, Open, Slice};
use crate::meta::Incarnation;
use crate::peer::LocalBoxFuture;
use crate::rt::sim;

const OLD: Incarnation = Incarnation(0x01d);
const NEW: Incarnation = Incarnation(0x2ef);

/// Notes in which order it was called, and whether the directory existed then.
struct Noted {
    disk: Disk,
    calls: Rc<RefCell<Vec<String>>>,
    former: Option<Incarnation>,
}

impl Retire for Noted {
    fn close_logs(&self, old: Incarnation) -> LocalBoxFuture<'_, ()> {
        Box::pin(async move {
            let there = self.disk.list(Path::new("/topics/orders")).await.is_ok();
            self.calls.borrow_mut().push(format!("close {old} there={there}"));
        })
    }

    fn was_live(&self, old: Incarnation) -> bool {
        self.former == Some(old)
    }
}

async fn setup() -> (Disk, TopicDirectories, Noted) {
    let disk = Disk::Sim(SimDisk::new(1));
    disk.create_dir(Path::new("/topics")).await.expect("simulated");
    let directories = TopicDirectories::new(disk.clone(), PathBuf::from("/topics"));
    let noted = Noted { disk: disk.clone(), calls: Rc::default(), former: None };
    (disk, directories, noted)
}

async fn write(disk: &Disk, path: &str, bytes: &[u8]) {
    let file = disk.open(Path::new(path), Open::Create, Caching::Buffered).await.expect("simulated");
    file.set_len(0).await.expect("simulated");
    file.write_durable_at(0, Slice::copy_from(bytes)).await.expect("simulated");
}

async fn exists(disk: &Disk, path: &str) -> bool {
    disk.list(Path::new(path)).await.is_ok()
}

#[test]
fn s3_asking_for_a_path_creates_nothing() {
    sim::run(1, async {
        let (disk, directories, _) = setup().await;
        let path = directories.partition_dir("orders", 7).expect("a legal name");
        assert_eq!(path, Path::new("/topics/orders/p00007"));
        assert_eq!(directories.marker("orders", NEW).await, Ok(Marker::Absent));
        assert!(!exists(&disk, "/topics/orders").await);
    });
}

#[test]
fn s5_a_stamped_directory_is_served_to_its_incarnation_only() {
    sim::run(1, async {
        let (_, directories, noted) = setup().await;
        directories.prepare("orders", NEW, &noted).await.expect("fresh");
        assert_eq!(directories.marker("orders", NEW).await, Ok(Marker::Matches));
        assert_eq!(directories.marker("orders", OLD).await, Ok(Marker::Different(Mark { id: NEW, checked: true })));
        directories.prepare("orders", NEW, &noted).await.expect("again");
        assert!(noted.calls.borrow().is_empty());
    });
}

#[test]
fn s6_s7_another_incarnation_is_set_aside_in_this_order() {
    sim::run(1, async {
        let (disk, directories, noted) = setup().await;
        directories.prepare("orders", OLD, &noted).await.expect("fresh");
        disk.create_dir(Path::new("/topics/orders/p00000")).await.expect("simulated");
        directories.prepare("orders", NEW, &noted).await.expect("set aside");
        assert_eq!(*noted.calls.borrow(), [format!("close {OLD} there=true")]);
        assert!(exists(&disk, "/topics/orders.stale-000000000000001d/p00000").await);
        assert!(!exists(&disk, "/topics/orders/p00000").await, "lesson n14.1: nothing old under the name");
        assert_eq!(directories.marker("orders", NEW).await, Ok(Marker::Matches));
    });
}

#[test]
fn lesson_d5_2_files_without_a_readable_marker_are_left_alone() {
    sim::run(1, async {
        let (disk, directories, noted) = setup().await;
        disk.create_dir(Path::new("/topics/orders")).await.expect("simulated");
        assert_eq!(directories.marker("orders", NEW).await, Ok(Marker::Absent), "a crash before the stamp");
        disk.create_dir(Path::new("/topics/orders/p00000")).await.expect("simulated");
        let doubted = directories.prepare("orders", NEW, &noted).await;
        assert!(matches!(doubted, Err(DirectoryError::InDoubt(_))), "{doubted:?}");
        for damaged in ["", "short\n", "000000000000001D\n", "0000000000000000000"] {
            write(&disk, "/topics/orders/incarnation", damaged.as_bytes()).await;
            let doubted = directories.prepare("orders", NEW, &noted).await;
            assert!(matches!(doubted, Err(DirectoryError::InDoubt(_))), "{damaged:?}: {doubted:?}");
        }
        assert!(exists(&disk, "/topics/orders/p00000").await);
    });
}

#[test]
fn s6_no_flipped_bit_makes_another_incarnation_of_a_marker() {
    let written = Mark::encode(NEW);
    assert_eq!(Mark::decode(written.as_bytes()), Some(Mark { id: NEW, checked: true }));
    for bit in 0..written.len() * 8 {
        let mut damaged = written.clone().into_bytes();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(Mark::decode(&damaged), None, "bit {bit}");
    }
    assert_eq!(
        Mark::decode(format!("{NEW}\n").as_bytes()),
        Some(Mark { id: NEW, checked: false }),
        "an older release's"
    );
}

#[test]
fn s6_a_mark_without_a_checksum_sets_nothing_aside_that_may_be_the_live_topics() {
    sim::run(1, async {
        let (disk, directories, mut noted) = setup().await;
        disk.create_dir(Path::new("/topics/orders")).await.expect("simulated");
        disk.create_dir(Path::new("/topics/orders/p00000")).await.expect("simulated");
        write(&disk, "/topics/orders/incarnation", format!("{NEW}\n").as_bytes()).await;
        directories.prepare("orders", NEW, &noted).await.expect("an older release's marker still opens");
        write(&disk, "/topics/orders/incarnation", format!("{OLD}\n").as_bytes()).await;
        let refused = directories.prepare("orders", NEW, &noted).await;
        let Err(DirectoryError::InDoubt(text)) = refused else { panic!("{refused:?}") };
        assert!(text.contains(&OLD.to_string()) && text.contains(&NEW.to_string()), "{text}");
        assert!(exists(&disk, "/topics/orders/p00000").await);
        let refused = directories.marker("orders", NEW).await;
        assert!(matches!(refused, Err(DirectoryError::InDoubt(_))), "{refused:?}");
        noted.former = Some(OLD);
        let next = Incarnation(0x3ff);
        directories.prepare("orders", next, &noted).await.expect("seen live by this process: an ordinary delete");
        assert!(exists(&disk, "/topics/orders.stale-000000000000001d/p00000").await);
    });
}

#[test]
fn s27_a_backup_of_the_deleted_topic_does_not_begin_the_live_one_again() {
    sim::run(1, async {
        let (disk, directories, noted) = setup().await;
        directories.prepare("orders", OLD, &noted).await.expect("fresh");
        disk.rename(Path::new("/topics/orders"), Path::new("/backup")).await.expect("simulated");
        directories.purge("orders", OLD).await.expect("confirmed");
        directories.prepare("orders", NEW, &noted).await.expect("fresh");
        disk.remove_dir_all(Path::new("/topics/orders")).await.expect("simulated");
        disk.rename(Path::new("/backup"), Path::new("/topics/orders")).await.expect("simulated");
        for _ in 0..2 {
            let refused = directories.prepare("orders", NEW, &noted).await;
            let Err(DirectoryError::Lost(text)) = refused else { panic!("{refused:?}") };
            let (stored, dir) = (format!("/stored/orders.{NEW} proves"), "/topics/orders is of the deleted");
            assert!(text.starts_with(&stored) && text.contains(dir), "{text}");
        }
        assert!(noted.calls.borrow().is_empty());
        assert_eq!(directories.marker("orders", OLD).await, Ok(Marker::Matches), "untouched");
        disk.remove_file(Path::new(&format!("/stored/orders.{NEW}"))).await.expect("simulated");
        directories.prepare("orders", NEW, &noted).await.expect("a person has decided");
        assert!(exists(&disk, "/topics/orders.stale-000000000000001d").await);
    });
}

#[test]
fn a_stamp_that_a_crash_interrupted_is_made_again() {
    sim::run(1, async {
        let (disk, directories, noted) = setup().await;
        disk.create_dir(Path::new("/topics/orders")).await.expect("simulated");
        write(&disk, "/topics/orders/incarnation.tmp", b"0000").await;
        directories.prepare("orders", NEW, &noted).await.expect("stamped again");
        assert_eq!(directories.marker("orders", NEW).await, Ok(Marker::Matches));
    });
}

#[test]
fn lesson_n75_3_a_name_never_acts_as_a_path() {
    sim::run(1, async {
        let (_, directories, noted) = setup().await;
        let long = "x".repeat(201);
        for name in ["", ".", "..", "a/b", "/etc", "a\0b", "a\\b", "ä", "a b", &long] {
            assert!(matches!(directories.partition_dir(name, 0), Err(DirectoryError::BadName(_))), "{name:?}");
            let refused = directories.prepare(name, NEW, &noted).await;
            assert!(matches!(refused, Err(DirectoryError::BadName(_))), "{name:?}");
            assert!(matches!(directories.purge(name, NEW).await, Err(DirectoryError::BadName(_))), "{name:?}");
        }
        assert!(directories.partition_dir(&"x".repeat(200), 0).is_ok());
        assert!(directories.partition_dir("...", 0).is_ok());
    });
}

#[test]
fn s10_only_the_confirmed_incarnation_is_removed() {
    sim::run(1, async {
        let (disk, directories, noted) = setup().await;
        directories.prepare("orders", OLD, &noted).await.expect("fresh");
        directories.prepare("orders", NEW, &noted).await.expect("set aside");
        directories.remove_stale("orders", NEW).await.expect("nothing of that name");
        assert!(exists(&disk, "/topics/orders.stale-000000000000001d").await);
        directories.purge("orders", OLD).await.expect("confirmed");
        assert!(!exists(&disk, "/topics/orders.stale-000000000000001d").await);
        assert_eq!(directories.marker("orders", NEW).await, Ok(Marker::Matches), "the live one is untouched");
        directories.purge("orders", NEW).await.expect("confirmed");
        assert!(!exists(&disk, "/topics/orders").await);
        directories.purge("orders", NEW).await.expect("purging again is no error");
    });
}

#[test]
fn s10_to_s13_the_inventory_tells_live_stale_and_unmarked_apart() {
    sim::run(1, async {
        let (disk, directories, noted) = setup().await;
        directories.prepare("orders", OLD, &noted).await.expect("fresh");
        directories.prepare("orders", NEW, &noted).await.expect("set aside");
        for dir in ["orders/p00003", "orders/p00001", "orders/p00001.quarantine", "orders/other", "lost"] {
            disk.create_dir(&Path::new("/topics").join(dir)).await.expect("simulated");
        }
        write(&disk, "/topics/orders/p00001.quarantine/00000000000000000000.log", &[0; 77]).await;
        write(&disk, "/topics/orders/p00003.stored", b"").await;
        write(&disk, "/topics/orders/p00004.stored", b"").await;
        // A legal topic name that looks like one that was set aside.
        directories.prepare("x.stale-00000000000000aa", NEW, &noted).await.expect("fresh");
        let found = directories.inventory().await.expect("listed");
        let seen: Vec<(&str, TopicKind)> = found.iter().map(|entry| (entry.topic.as_str(), entry.kind)).collect();
        let expected = [
            ("lost", TopicKind::Unmarked),
            ("orders", TopicKind::Marked(NEW)),
            ("orders", TopicKind::Stale(OLD)),
            ("x.stale-00000000000000aa", TopicKind::Marked(NEW)),
        ];
        assert_eq!(seen, expected);
        assert_eq!(found[1].partitions, [1, 3, 4], "one whose directory has gone is missed at the start");
        assert_eq!(found[1].quarantined, [("p00001.quarantine".to_owned(), 77)]);
    });
}

#[test]
fn e1_a_marker_that_a_killed_process_left_unsynced_is_made_durable_before_use() {
    for calls in 0..18 {
        let simulation = sim::Sim::new(calls);
        let handle = simulation.clone();
        simulation.run(async move {
            let device = SimDisk::new(calls);
            let disk = Disk::Sim(device.clone());
            disk.create_dir(Path::new("/topics")).await.expect("simulated");
            disk.sync_dir(Path::new("/")).await.expect("simulated");
            let directories = TopicDirectories::new(disk.clone(), PathBuf::from("/topics"));
            device.freeze_after(calls);
            let (stamping, noted) =
                (directories.clone(), Noted { disk: disk.clone(), calls: Rc::default(), former: None });
            handle.spawn_on(1, async move {
                let _ = stamping.prepare("orders", NEW, &noted).await; // killed wherever it stands
            });
            crate::rt::sleep(std::time::Duration::from_secs(1)).await;
            handle.kill(1);
            device.clear_faults();
            device.process_crash();
            crate::rt::sleep(std::time::Duration::from_millis(6)).await;
            let noted = Noted { disk: disk.clone(), calls: Rc::default(), former: None };
            directories.prepare("orders", NEW, &noted).await.expect("after any kill");
            device.power_cut_as(crate::io::sim::Survival::Nothing);
            assert_eq!(directories.marker("orders", NEW).await, Ok(Marker::Matches), "after {calls} calls");
            let proven = directories.proven().await.expect("simulated");
            assert_eq!(proven, [("orders".to_owned(), NEW)], "after {calls} calls");
        });
    }
}
