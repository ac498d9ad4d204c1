//! E12: the lock of a data directory is held until the last write of a killed process has landed.

use std::fs::File;
use std::time::{Duration, Instant};

use narad_harness::disk::{AttachedDisk, Recorder};
use narad_harness::process::Broker;

use crate::support::{binary, eventually, Scratch, Wire, PATIENCE};

const WRITE_TAKES: Duration = Duration::from_millis(1_500);

#[test]
fn e12_the_lock_outlives_a_killed_process_until_its_last_write_has_landed() {
    let scratch = Scratch::new("slow-disk");
    let recorder = Recorder::new(vec![0; 500 << 20]);
    let attached = AttachedDisk::attach(recorder.clone(), &scratch.path("disk")).and_then(|mut disk| {
        disk.format("ext4")?;
        let at = disk.mount()?;
        Ok((disk, at))
    });
    let (disk, at) = match attached {
        Ok(attached) => attached,
        Err(error) => return eprintln!("skipped: a slow disk needs root, FUSE and loop devices: {error}"),
    };
    let data = at.join("data");
    let arguments = ["--no-pin", "--memory", "256MiB", "--shards", "1"];
    let mut broker = Broker::start(binary(), &data, &arguments).unwrap();
    assert_eq!(broker.client().post("/v1/topics", b"{\"name\":\"t\"}").unwrap().status, 201);
    recorder.start_recording();
    recorder.delay_writes(WRITE_TAKES);
    let marker = b"the last write of a killed process";
    let mut wire = Wire::open(broker.address);
    let head = "POST /v1/topics/t/produce HTTP/1.1\r\nHost: a\r\nX-Narad-Client: a\r\n";
    wire.send(format!("{head}Content-Length: {}\r\n\r\n", marker.len())).unwrap();
    wire.send(marker).unwrap();
    // The write is with the device by now, and stays there.
    std::thread::sleep(Duration::from_millis(300));
    assert!(!recorder.has_landed(marker));
    let killed = Instant::now();
    broker.signal(9).unwrap();
    let lock = File::open(data.join("lock")).unwrap();
    eventually("the lock is free", || lock.try_lock().is_ok());
    let free_after = killed.elapsed();
    let landed = recorder.has_landed(marker);
    recorder.delay_writes(Duration::ZERO);
    let _ = broker.kill();
    // Had it not landed by then, it would now, under the feet of the next owner.
    std::thread::sleep(if landed { Duration::ZERO } else { WRITE_TAKES * 2 });
    let landed_later = recorder.has_landed(marker);
    println!("lock free {free_after:?} after the kill; landed by then: {landed}, later: {landed_later}");
    assert!(landed || !landed_later, "the lock was free {free_after:?} after the kill, and a write landed afterwards");
    assert!(landed, "the write never reached the device: this run shows nothing");
    drop(lock);
    let mut next = Broker::start(binary(), &data, &arguments).unwrap();
    assert_eq!(next.client().get("/v1/topics/t/consume?wait=10s").unwrap().status, 200);
    // Gracefully: after a kill the file system stays busy for as long as the ring is being torn down.
    assert_eq!(next.stop(PATIENCE).unwrap().code(), Some(0));
    drop(disk);
}
