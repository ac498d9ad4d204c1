//! `narad cluster members`, `narad cluster members forget`.

use std::io::Write;

use argh::{ArgsInfo, FromArgs};
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::Value;

use super::client::{Client, Request, Response};
use super::render::{indented, percent};
use super::Failure;

/// Look at the cluster, and change who belongs to it.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "cluster")]
pub struct Cluster {
    #[argh(subcommand)]
    command: ClusterCommand,
}

#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand)]
enum ClusterCommand {
    Members(Members),
}

/// Print the members of the cluster as JSON.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "members")]
struct Members {
    /// ask each member for its own status as well
    #[argh(switch)]
    detail: bool,
    #[argh(subcommand)]
    command: Option<MembersCommand>,
}

#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand)]
enum MembersCommand {
    Forget(Forget),
}

/// Remove a server from consensus that never became a member.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "forget")]
struct Forget {
    #[argh(positional)]
    id: String,
}

pub fn run(cluster: Cluster, client: &mut Client, out: &mut dyn Write) -> Result<(), Failure> {
    let ClusterCommand::Members(members) = cluster.command;
    let Some(MembersCommand::Forget(Forget { id })) = members.command else {
        let detail = if members.detail { "?detail=true" } else { "" };
        let request = Request::new("GET", format!("/v1/cluster/members{detail}"));
        return print::<MemberList>(&client.call(&request)?, out);
    };
    let path = format!("/v1/cluster/members/{}/forget", percent(id.as_bytes()));
    print::<Forgotten>(&client.call(&Request::new("POST", path))?, out)
}

/// What a member list has at least.
#[derive(Deserialize)]
struct MemberList {
    #[serde(rename = "members")]
    _members: Vec<Value>,
}

#[derive(Deserialize)]
struct Forgotten {
    #[serde(rename = "id")]
    _id: String,
    #[serde(rename = "voter")]
    _voter: bool,
}

/// Prints the answer as the server sent it, once it is known to be one.
fn print<'a, T: Deserialize<'a>>(response: &'a Response, out: &mut dyn Write) -> Result<(), Failure> {
    if response.status != 200 {
        return Err(response.failure());
    }
    serde_json::from_slice::<T>(&response.body).map_err(|error| response.unknown_shape(&error.to_string()))?;
    let value: Box<RawValue> = response.json()?;
    Ok(writeln!(out, "{}", indented(value.get()))?)
}

#[cfg(test)]
mod tests {
    use crate::cli::tests::{answer, failure, first_line, narad};

    #[test]
    fn cluster_members_are_printed_as_the_server_sends_them_and_one_is_forgotten() {
        let listed = answer("200 OK", r#"{"members":[{"id":"a","voter":true}]}"#);
        let done = narad(&["cluster", "members"], "", vec![listed.clone()]);
        done.result.unwrap();
        assert!(done.out.contains("\"id\": \"a\""), "{}", done.out);
        assert_eq!(first_line(&done.seen[0]), "GET /v1/cluster/members HTTP/1.1");
        let detailed = narad(&["cluster", "members", "--detail"], "", vec![listed]);
        assert_eq!(first_line(&detailed.seen[0]), "GET /v1/cluster/members?detail=true HTTP/1.1");
        let done = narad(
            &["cluster", "members", "forget", "n/4"],
            "",
            vec![answer("200 OK", r#"{"id":"n/4","voter":false}"#)],
        );
        done.result.unwrap();
        assert_eq!(first_line(&done.seen[0]), "POST /v1/cluster/members/n%2F4/forget HTTP/1.1");
        assert!(done.out.contains("\"voter\": false"), "{}", done.out);
        let refused = narad(
            &["cluster", "members", "forget", "a"],
            "",
            vec![answer("409 Conflict", r#"{"error":"a has a member record"}"#)],
        );
        assert!(failure(refused).contains("a has a member record"));
    }
}
