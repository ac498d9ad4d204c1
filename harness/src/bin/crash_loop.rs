//! Kills a broker with SIGKILL under load, again and again, and counts: no `202` lost, nothing acked comes back
//! outside the allowed window, every duplicate explained by a kill.

use std::io;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use argh::FromArgs;
use narad_harness::ledger::Verdict;
use narad_harness::load::{create_topic, oldest_unwritten, Run};
use narad_harness::process::Broker;
use narad_harness::random::Random;

const TOPIC: &str = "crash-loop";

/// Kill -9 a broker under load for a number of rounds and check the delivery contract.
#[derive(FromArgs)]
struct Arguments {
    /// broker binary (default target/release/narad)
    #[argh(option, default = "PathBuf::from(\"target/release/narad\")")]
    binary: PathBuf,
    /// kills (default 100)
    #[argh(option, default = "100")]
    rounds: u32,
    /// shards per round, used in turn, for example 1,2,4,3,1 (default 2)
    #[argh(option, default = "String::from(\"2\")")]
    shards: String,
    /// seed of sizes and kill times (default: from the clock)
    #[argh(option)]
    seed: Option<u64>,
    /// data directory, kept (default: a new one under the temporary directory, removed on success)
    #[argh(option)]
    data_dir: Option<PathBuf>,
    /// longest time between two kills in ms (default 1500)
    #[argh(option, default = "1500")]
    round_ms_max: u64,
}

fn rounds(arguments: &Arguments, run: &Arc<Run>, data: &std::path::Path, random: &mut Random) -> io::Result<()> {
    let shards: Vec<&str> = arguments.shards.split(',').collect();
    let mut spawned = Vec::new();
    for round in 0..=arguments.rounds {
        run.set_round(round);
        let count = shards[round as usize % shards.len()];
        let mut broker =
            Broker::start(&arguments.binary, data, &["--shards", count, "--no-pin", "--memory", "512MiB"])?;
        if round == 0 {
            create_topic(broker.address, TOPIC)?;
            spawned = run.start(random);
        }
        run.set_addresses(vec![broker.address]);
        if round == arguments.rounds {
            run.finish(Duration::from_secs(30));
            let status = broker.stop(Duration::from_secs(30))?;
            if !status.success() {
                run.ledger().violations.push(format!("the last broker exited with {status} after SIGTERM"));
            }
            break;
        }
        thread::sleep(Duration::from_millis(random.range(20, arguments.round_ms_max)));
        let (asked, unwritten) = oldest_unwritten(broker.client())?;
        run.set_addresses(Vec::new());
        broker.kill()?;
        run.ledger().killed(Instant::now(), asked, unwritten);
        run.count_owed();
    }
    for worker in spawned {
        if worker.join().is_err() {
            return Err(io::Error::other("a worker of this program panicked"));
        }
    }
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Arguments = argh::from_env();
    let seed = arguments.seed.unwrap_or_else(|| {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64)
    });
    let data = arguments
        .data_dir
        .clone()
        .unwrap_or_else(|| std::env::temp_dir().join(format!("narad-crash-loop-{}", std::process::id())));
    println!(
        "crash-loop: {} rounds, shards {}, seed {seed}, data {}",
        arguments.rounds,
        arguments.shards,
        data.display()
    );
    let run = Arc::new(Run::new(TOPIC));
    let finished =
        std::fs::create_dir_all(&data).and_then(|()| rounds(&arguments, &run, &data, &mut Random::new(seed)));
    let mut ledger = run.ledger();
    if let Err(error) = finished {
        ledger.violations.push(format!("the run stopped: {error}"));
    }
    let verdict = ledger.judge();
    println!("{verdict:#?}");
    println!("longest wait of an ack for the page cache, as seen before a kill: {:?}", ledger.longest_unwritten());
    // A run in which nothing happened proves nothing.
    let floor = u64::from(arguments.rounds) * 20;
    if verdict.accepted < floor || verdict.acked < floor / 2 {
        let text = format!(
            "too little evidence: {} accepted, {} acked, want {floor} and {}",
            verdict.accepted,
            verdict.acked,
            floor / 2
        );
        ledger.violations.push(text);
    }
    for violation in ledger.violations.iter().take(50) {
        println!("VIOLATION: {violation}");
    }
    if verdict == Verdict::default() || !ledger.violations.is_empty() {
        println!("FAILED with {} violations; data and log kept in {}", ledger.violations.len(), data.display());
        return ExitCode::FAILURE;
    }
    if arguments.data_dir.is_none() {
        let _ = std::fs::remove_dir_all(&data);
    }
    println!("ok");
    ExitCode::SUCCESS
}
