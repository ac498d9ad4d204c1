//! `narad server report`: what each topic holds, in one table.

use std::io::Write;

use argh::{ArgsInfo, FromArgs};

use super::client::Client;
use super::render::table;
use super::topic::{self, Details};
use super::Failure;
use crate::config::format_bytes;

/// Print what each topic holds.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "report")]
pub struct Report {}

pub fn run(client: &mut Client, out: &mut dyn Write) -> Result<(), Failure> {
    let mut rows = vec![["TOPIC", "PARTS", "MESSAGES", "SIZE", "OWNERS", "ROLE"].map(str::to_owned).to_vec()];
    let (mut topics, mut partitions, mut messages, mut bytes, mut partial) = (0u64, 0u64, 0u64, 0u64, 0u64);
    for (topic, _) in topic::all(client)? {
        let details = match Details::find(client, &topic.name, None)? {
            Some(details) => details,
            None => continue, // deleted since it was listed
        };
        let (known, unknown): (Vec<_>, Vec<_>) = details.partition_stats.iter().partition(|stats| stats.is_known());
        let held: u64 = known.iter().map(|stats| stats.high_watermark.saturating_sub(stats.oldest_offset)).sum();
        let size: u64 = known.iter().map(|stats| stats.size_bytes).sum();
        let mut owners: Vec<&str> = details.partition_stats.iter().map(|stats| stats.owner_node.as_str()).collect();
        owners.sort_unstable();
        owners.dedup();
        let role = topic.role().to_owned();
        let mut row = vec![
            topic.name,
            topic.partitions.to_string(),
            held.to_string(),
            format_bytes(size),
            owners.join(","),
            role,
        ];
        if !unknown.is_empty() {
            row.push(format!("[{} of {} partitions unavailable]", unknown.len(), topic.partitions));
            partial += 1;
        }
        rows.push(row);
        topics += 1;
        partitions += topic.partitions;
        messages += held;
        bytes += size;
    }
    let total = ["total".to_owned(), partitions.to_string(), messages.to_string(), format_bytes(bytes)];
    rows.push([&total[..], &[String::new(), format!("{topics} topic(s)")]].concat());
    write!(out, "{}", table(&rows))?;
    if partial > 0 {
        writeln!(out, "{partial} topic(s) partial: what is unavailable is in no number")?;
    }
    Ok(())
}
