//! One process to a data directory: an `flock` on `<data>/lock` (E12).
//!
//! Shards register this descriptor in their rings, so that the kernel keeps the lock until the last write of a killed
//! process has landed. That is why a start right after a kill may have to wait (lesson D11).

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Seek, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::traces::Traces;
use super::Refusal;

pub struct DataLock {
    file: File,
    /// When this process made the lock file.
    made: Option<PathBuf>,
}

impl DataLock {
    /// The lock file, if it is new. Drop it while the lock is held: others look whether what they have locked is still
    /// there.
    pub fn trace(&self) -> Traces {
        Traces::given(self.made.clone())
    }

    /// Another descriptor of the same lock, for a shard's ring to hold: the lock lives until the last one is closed.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.file.as_fd().try_clone_to_owned()
    }
}

impl AsFd for DataLock {
    /// To be registered in every shard's ring.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// How long to ask.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    pub between: Duration,
    /// When to say why the start takes so long.
    pub say_after: Duration,
    pub give_up_after: Duration,
}

impl Patience {
    pub const START: Patience = Patience {
        between: Duration::from_millis(50),
        say_after: Duration::from_millis(250),
        give_up_after: Duration::from_secs(10),
    };
}

/// Takes the lock of an existing directory. `say` is called at most once, with a sentence for the operator.
pub fn lock_data_directory(
    directory: &Path,
    patience: Patience,
    say: &mut dyn FnMut(String),
) -> Result<DataLock, Refusal> {
    let path = directory.join("lock");
    let open = || open(&path).map_err(|error| super::data_dir::not_writable(directory, &error));
    let (mut file, mut made) = open()?;
    let started = Instant::now();
    let mut said = false;
    loop {
        match file.try_lock() {
            Ok(()) if is_at(&file, &path) => break,
            // A start that was refused has taken its lock file back.
            Ok(()) => {
                (file, made) = open()?;
                continue;
            }
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(TryLockError::Error(error)) => {
                return Err(Refusal::new(
                    format!("cannot lock {}: {error}", path.display()),
                    "put storage.data_dir on a local file system",
                ));
            }
        }
        let waited = started.elapsed();
        if waited >= patience.give_up_after {
            let holder = holder(&mut file);
            return Err(Refusal::new(
                format!("the data directory {} is in use by {holder}", directory.display()),
                "stop that process, or choose another storage.data_dir; after a kill, look for a disk that hangs",
            ));
        }
        if waited >= patience.say_after && !said {
            said = true;
            let holder = holder(&mut file);
            say(format!(
                "waiting for the data directory {}, in use by {holder}: after a kill its last writes may still be on their way to the disk",
                directory.display()
            ));
        }
        std::thread::sleep(patience.between);
    }
    // For the messages above only; nothing depends on it.
    let _ = file.set_len(0).and_then(|()| file.rewind()).and_then(|()| writeln!(file, "{}", std::process::id()));
    Ok(DataLock { file, made: made.then_some(path) })
}

/// The lock file, and whether it was made by this call.
fn open(path: &Path) -> io::Result<(File, bool)> {
    let options = || {
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(0o600);
        options
    };
    loop {
        match options().create_new(true).open(path) {
            Ok(file) => return Ok((file, true)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
        match options().open(path) {
            Ok(file) => return Ok((file, false)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {} // taken back between the two calls
            Err(error) => return Err(error),
        }
    }
}

fn is_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), std::fs::metadata(path)) {
        (Ok(ours), Ok(named)) => (ours.dev(), ours.ino()) == (named.dev(), named.ino()),
        _ => false,
    }
}

/// Who holds the lock of a data directory, if somebody does. Takes nothing: a start that comes at the same moment loses
/// one attempt of many.
pub fn holder_of(directory: &Path) -> io::Result<Option<String>> {
    let mut file = match File::open(directory.join("lock")) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    match file.try_lock_shared() {
        Ok(()) => Ok(None), // freed as the file is closed
        Err(TryLockError::WouldBlock) => Ok(Some(holder(&mut file))),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Who holds the lock, as far as the lock file and the process table tell.
fn holder(file: &mut File) -> String {
    let mut text = String::new();
    let pid: Option<u32> = match file.rewind().and_then(|()| file.take(32).read_to_string(&mut text)) {
        Ok(_) => text.trim().parse().ok(),
        Err(_) => None,
    };
    match pid {
        None => "another process".to_owned(),
        Some(pid) => match std::fs::read_to_string(format!("/proc/{pid}/comm")) {
            Ok(name) => format!("process {pid} ({})", name.trim()),
            Err(_) => format!("what process {pid}, which is gone, has left to the kernel"),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Patience = Patience {
        between: Duration::from_millis(10),
        say_after: Duration::from_millis(30),
        give_up_after: Duration::from_millis(120),
    };

    #[test]
    fn e12_the_second_process_waits_says_why_and_is_refused() {
        let directory = std::env::temp_dir().join(format!("narad-lock-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let mut said = Vec::new();
        let first = lock_data_directory(&directory, SHORT, &mut |text| said.push(text)).unwrap();
        assert!(said.is_empty());
        let seen = holder_of(&directory).unwrap();
        assert!(seen.unwrap().starts_with(&format!("process {} (", std::process::id())));
        let error = lock_data_directory(&directory, SHORT, &mut |text| said.push(text)).err().unwrap().to_string();
        let me = format!("process {}", std::process::id());
        assert!(error.contains("is in use by") && error.contains(&me), "{error}");
        assert!(
            said.len() == 1 && said[0].contains("waiting for the data directory") && said[0].contains(&me),
            "{said:?}"
        );
        // Whoever is gone is named as gone.
        std::fs::write(directory.join("lock"), "4294967294\n").unwrap();
        let error = lock_data_directory(&directory, SHORT, &mut |_| {}).err().unwrap().to_string();
        assert!(error.contains("process 4294967294, which is gone"), "{error}");
        drop(first);
        assert_eq!(holder_of(&directory).unwrap(), None);
        lock_data_directory(&directory, SHORT, &mut |_| panic!("nothing to wait for")).unwrap();
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn e12_a_lock_file_that_was_taken_back_protects_nobody() {
        let directory = std::env::temp_dir().join(format!("narad-lock-back-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let first = lock_data_directory(&directory, SHORT, &mut |_| {}).unwrap();
        let mut refused = Some((first.trace(), first));
        // The holder is refused, and gone, exactly when we have said that we wait for it.
        let long = Patience { give_up_after: Duration::from_secs(10), ..SHORT };
        let second = lock_data_directory(&directory, long, &mut |_| drop(refused.take())).unwrap();
        assert!(directory.join("lock").exists(), "the second holds a file that has no name");
        let third = lock_data_directory(&directory, SHORT, &mut |_| {});
        assert!(third.err().unwrap().to_string().contains("is in use by"));
        drop(second);
        // An old lock file is nobody's to take back.
        drop(lock_data_directory(&directory, SHORT, &mut |_| {}).unwrap().trace());
        assert!(directory.join("lock").exists());
        std::fs::remove_dir_all(&directory).unwrap();
    }

    #[test]
    fn lesson_d11_a_lock_that_is_freed_meanwhile_is_taken() {
        let directory = std::env::temp_dir().join(format!("narad-lock-freed-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        let mut first = Some(lock_data_directory(&directory, SHORT, &mut |_| {}).unwrap());
        let long = Patience { give_up_after: Duration::from_secs(10), ..SHORT };
        // The holder goes away exactly when we have said that we wait.
        let second = lock_data_directory(&directory, long, &mut |_| drop(first.take())).unwrap();
        drop(second);
        std::fs::remove_dir_all(&directory).unwrap();
    }
}
