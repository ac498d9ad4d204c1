//! Makes every failure that the delivery contract lists, one after the other, on a real cluster, and checks what a producer
//! and a consumer see of it, and what is lost.

use std::path::PathBuf;
use std::process::ExitCode;

use argh::FromArgs;
use narad_harness::cluster::{Cluster, Plan};
use narad_harness::matrix::{self, Verdict, ROWS};

/// Walk the failure matrix row by row on a local cluster of three nodes.
#[derive(FromArgs)]
struct Arguments {
    /// the script that starts and breaks it (default scripts/cluster)
    #[argh(option, default = "PathBuf::from(\"scripts/cluster\")")]
    cluster: PathBuf,
    /// broker binary (default target/release/narad)
    #[argh(option, default = "PathBuf::from(\"target/release/narad\")")]
    binary: PathBuf,
    /// shards of each node (default 1)
    #[argh(option, default = "1")]
    shards: u32,
    /// only these rows, separated by commas (default: all; `--only help` lists them)
    #[argh(option)]
    only: Option<String>,
    /// rounds of the rolling restart (default 1)
    #[argh(option, default = "1")]
    rounds: u32,
    /// where data and logs go; kept on failure (default: a new directory under the temporary one)
    #[argh(option)]
    dir: Option<PathBuf>,
}

fn chosen(only: Option<&str>) -> Result<Vec<usize>, String> {
    let Some(only) = only else { return Ok((0..ROWS.len()).collect()) };
    let find = |name: &str| {
        let names: Vec<&str> = ROWS.iter().map(|row| row.name).collect();
        names.iter().position(|known| *known == name).ok_or_else(|| format!("the rows are {}", names.join(", ")))
    };
    only.split(',').map(find).collect()
}

fn main() -> ExitCode {
    let arguments: Arguments = argh::from_env();
    let rows = match chosen(arguments.only.as_deref()) {
        Ok(rows) => rows,
        Err(error) => {
            eprintln!("failure-matrix: {error}");
            return ExitCode::from(2);
        }
    };
    let dir = arguments
        .dir
        .clone()
        .unwrap_or_else(|| std::env::temp_dir().join(format!("narad-failure-matrix-{}", std::process::id())));
    let plan = Plan {
        script: &arguments.cluster,
        binary: &arguments.binary,
        dir: &dir,
        nodes: 3,
        shards: arguments.shards,
        disk_mb: 1024,
    };
    let cluster = match Cluster::up(&plan) {
        Ok(cluster) => cluster,
        Err(error) => {
            eprintln!("failure-matrix: the cluster did not start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let verdicts = matrix::walk(&cluster, &rows, arguments.rounds);
    let failed = verdicts.iter().any(|(_, verdict)| matches!(verdict, Verdict::Failed));
    println!();
    for (row, verdict) in &verdicts {
        println!("{:<8} {}", verdict.word(), ROWS[*row].event);
    }
    if let Err(error) = cluster.down(failed) {
        println!("the cluster could not be taken down: {error}");
    }
    if failed {
        println!("FAILED; data and logs kept in {}", dir.display());
        return ExitCode::FAILURE;
    }
    println!("ok");
    ExitCode::SUCCESS
}
