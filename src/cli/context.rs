//! `narad ctx`: servers under names of one's own, in a file of the user's.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use argh::{ArgsInfo, FromArgs};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::client::{Endpoint, DEFAULT_SERVER};
use super::Failure;

/// Give servers names, and choose one for the commands to come.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "ctx")]
pub struct Ctx {
    #[argh(subcommand)]
    command: CtxCommand,
}

#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand)]
enum CtxCommand {
    Add(Add),
    Select(Select),
    Ls(Ls),
    Rm(Rm),
}

/// Save a server under a name: narad ctx add prod --server http://host:7942. The first one becomes current.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "add")]
struct Add {
    #[argh(positional)]
    name: String,
}

/// Make a context current: commands go to its server unless told otherwise.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "select")]
struct Select {
    #[argh(positional)]
    name: String,
}

/// List contexts; a star marks the current one.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "ls")]
struct Ls {}

/// Forget a context.
#[derive(ArgsInfo, FromArgs, Debug)]
#[argh(subcommand, name = "rm")]
struct Rm {
    #[argh(positional)]
    name: String,
}

/// What a variable of the environment says; an empty one says nothing.
pub type Environment<'a> = &'a dyn Fn(&str) -> Option<String>;

/// Variables that say where to go, and as whom.
const VARIABLES: [&str; 3] = ["NARAD_ADDR", "NARAD_USER", "NARAD_PASS"];

/// Where a command goes: flag, environment, current context, default; with `--ctx` its server, unless a flag says
/// otherwise.
pub fn endpoint(server: Option<&str>, ctx: Option<&str>, environment: Environment<'_>) -> Result<Endpoint, Failure> {
    if let Some(name) = ctx {
        if let Some(set) = VARIABLES.iter().find(|name| environment(name).is_some()) {
            let text = format!("--ctx {name}: {set} is set as well, and says otherwise: unset it, or leave --ctx out");
            return Err(Failure::Usage(text));
        }
        let (_, contexts) = Contexts::load(environment)?;
        let context = contexts.find(name)?;
        return Endpoint::parse(server.unwrap_or(&context.server));
    }
    if let Some(server) = server.map(str::to_owned).or_else(|| environment("NARAD_ADDR")) {
        return Endpoint::parse(&server);
    }
    let current = match file(environment) {
        Ok(_) => Contexts::load(environment)?.1.current_server()?,
        Err(_) => None, // a process without a home has no contexts
    };
    Endpoint::parse(current.as_deref().unwrap_or(DEFAULT_SERVER))
}

pub fn run(
    command: Ctx,
    server: Option<&str>,
    environment: Environment<'_>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<(), Failure> {
    let (path, mut contexts) = Contexts::load(environment)?;
    match command.command {
        CtxCommand::Add(Add { name }) => {
            let usage = |text: String| Failure::Usage(format!("ctx add {name:?}: {text}"));
            let server = server.ok_or_else(|| usage("say where it is: --server http://host:port".to_owned()))?;
            Endpoint::parse(server)?;
            if name.is_empty() || name.contains(|c: char| c.is_whitespace() || c.is_control()) {
                return Err(usage("a name has no blanks, and is not empty".to_owned()));
            }
            contexts.contexts.entry(name.clone()).or_default().server = server.to_owned();
            if contexts.current.is_empty() {
                contexts.current = name.clone();
            }
            contexts.save(&path)?;
            writeln!(out, "context \"{name}\" saved (current: {})", contexts.current)?;
        }
        CtxCommand::Select(Select { name }) => {
            contexts.find(&name)?;
            contexts.current = name;
            contexts.save(&path)?;
            writeln!(out, "current context: {}", contexts.current)?;
        }
        CtxCommand::Ls(Ls {}) => {
            for (name, context) in &contexts.contexts {
                let star = if *name == contexts.current { '*' } else { ' ' };
                writeln!(out, "{star} {name} {} user=-", context.server)?;
            }
        }
        CtxCommand::Rm(Rm { name }) => {
            contexts.find(&name)?;
            contexts.contexts.remove(&name);
            if contexts.current == name {
                contexts.current.clear();
                writeln!(err, "no context is current now: narad ctx select makes one")?;
            }
            contexts.save(&path)?;
        }
    }
    Ok(())
}

/// The file. What this build does not know in it stays there.
#[derive(Default, Serialize, Deserialize)]
struct Contexts {
    /// Empty: none.
    #[serde(default)]
    current: String,
    #[serde(default)]
    contexts: BTreeMap<String, Context>,
    #[serde(flatten)]
    more: Map<String, Value>,
}

#[derive(Default, Serialize, Deserialize)]
struct Context {
    server: String,
    #[serde(flatten)]
    more: Map<String, Value>,
}

impl Contexts {
    /// With the path of the file; one that is not there holds nothing.
    fn load(environment: Environment<'_>) -> Result<(PathBuf, Contexts), Failure> {
        let path = file(environment)?;
        let wrong = |why: String| Failure::Request(format!("contexts in {}: {why}", path.display()));
        let contexts = match fs::read_to_string(&path) {
            Ok(text) => serde_json::from_str(&text)
                .map_err(|error| wrong(format!("{error}: mend the file, or remove it and add them again")))?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Contexts::default(),
            Err(error) => return Err(wrong(format!("cannot be read: {error}"))),
        };
        Ok((path, contexts))
    }

    /// In one step: a crash leaves the old file or the new one.
    fn save(&self, path: &Path) -> Result<(), Failure> {
        let written = || {
            let text = serde_json::to_string_pretty(self)?;
            let directory = path.parent().unwrap_or(Path::new("."));
            DirBuilder::new().recursive(true).mode(0o700).create(directory)?;
            let new = path.with_extension(format!("json.{}", std::process::id()));
            let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            let renamed = writeln!(file, "{text}").and_then(|()| fs::rename(&new, path));
            renamed.inspect_err(|_| drop(fs::remove_file(&new)))
        };
        written().map_err(|error: io::Error| {
            Failure::Request(format!("contexts in {}: cannot be written: {error}", path.display()))
        })
    }

    fn find(&self, name: &str) -> Result<&Context, Failure> {
        self.contexts.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.contexts.keys().map(String::as_str).collect();
            match names.is_empty() {
                true => Failure::Usage(format!("there is no context {name:?}, nor any other: narad ctx add makes one")),
                false => Failure::Usage(format!("there is no context {name:?}: there are {}", names.join(", "))),
            }
        })
    }

    fn current_server(&self) -> Result<Option<String>, Failure> {
        match self.current.is_empty() {
            true => Ok(None),
            false => Ok(Some(self.find(&self.current)?.server.clone())),
        }
    }
}

/// `contexts.json` in `NARAD_CONFIG_DIR`, else in `narad` below the user's directory of settings.
fn file(environment: Environment<'_>) -> Result<PathBuf, Failure> {
    let directory = environment("NARAD_CONFIG_DIR")
        .map(PathBuf::from)
        .or_else(|| environment("XDG_CONFIG_HOME").map(|home| Path::new(&home).join("narad")))
        .or_else(|| environment("HOME").map(|home| Path::new(&home).join(".config/narad")));
    let without = || Failure::Usage("contexts are kept below HOME, and it is not set: set NARAD_CONFIG_DIR".to_owned());
    Ok(directory.ok_or_else(without)?.join("contexts.json"))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    struct Home(PathBuf);

    impl Home {
        fn new(test: &str) -> Home {
            Home(std::env::temp_dir().join(format!("narad-ctx-{}-{test}", std::process::id())))
        }

        fn set(&self, more: &[(&str, &str)], name: &str) -> Option<String> {
            let given = more.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
            given.or_else(|| (name == "HOME").then(|| self.0.display().to_string()))
        }

        fn ctx(&self, args: &[&str], server: Option<&str>) -> Result<String, Failure> {
            let command = Ctx::from_args(&["ctx"], args).unwrap();
            let mut out = Vec::new();
            run(command, server, &|name| self.set(&[], name), &mut out, &mut Vec::new())?;
            Ok(String::from_utf8(out).unwrap())
        }

        fn goes_to(&self, server: Option<&str>, ctx: Option<&str>, more: &[(&str, &str)]) -> Result<Endpoint, Failure> {
            endpoint(server, ctx, &|name| self.set(more, name))
        }
    }

    impl Drop for Home {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn usage(result: Result<impl std::fmt::Debug, Failure>) -> String {
        match result {
            Err(Failure::Usage(text)) => text,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn contexts_are_saved_selected_listed_and_removed() {
        let home = Home::new("life");
        assert_eq!(home.ctx(&["ls"], None).unwrap(), "");
        assert_eq!(home.ctx(&["add", "prod"], Some("http://p:1")).unwrap(), "context \"prod\" saved (current: prod)\n");
        assert_eq!(home.ctx(&["add", "dev"], Some("d:2")).unwrap(), "context \"dev\" saved (current: prod)\n");
        assert_eq!(home.ctx(&["ls"], None).unwrap(), "  dev d:2 user=-\n* prod http://p:1 user=-\n");
        assert_eq!(home.ctx(&["select", "dev"], None).unwrap(), "current context: dev\n");
        let path = home.0.join(".config/narad/contexts.json");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        // What another build wrote there stays.
        let text = fs::read_to_string(&path).unwrap().replacen("\"server\"", "\"user\": \"ann\",\n\"server\"", 1);
        fs::write(&path, text).unwrap();
        home.ctx(&["rm", "prod"], None).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert!(text.contains("ann") && !text.contains("prod"), "{text}");
        assert_eq!(usage(home.ctx(&["select", "prod"], None)), "there is no context \"prod\": there are dev");
        home.ctx(&["rm", "dev"], None).unwrap();
        assert!(usage(home.ctx(&["rm", "dev"], None)).contains("nor any other"));
        assert!(usage(home.ctx(&["add", "x"], None)).contains("--server http://host:port"));
        assert!(usage(home.ctx(&["add", "a b"], Some("h:1"))).contains("no blanks"));
        assert!(usage(home.ctx(&["add", "x"], Some("https://h"))).contains("https://h"));
        fs::write(&path, "{").unwrap();
        let damaged = home.ctx(&["ls"], None);
        assert!(matches!(&damaged, Err(Failure::Request(text)) if text.contains("contexts.json: ")), "{damaged:?}");
    }

    #[test]
    fn a_command_goes_where_flag_then_environment_then_context_then_default_say() {
        let home = Home::new("order");
        let at = |url: &str| Endpoint::parse(url);
        assert_eq!(home.goes_to(None, None, &[]), at("http://127.0.0.1:7942"));
        home.ctx(&["add", "prod"], Some("p:1")).unwrap();
        home.ctx(&["add", "dev"], Some("d:2")).unwrap();
        assert_eq!(home.goes_to(None, None, &[]), at("p:1"));
        assert_eq!(home.goes_to(None, None, &[("NARAD_ADDR", "e:3")]), at("e:3"));
        assert_eq!(home.goes_to(Some("f:4"), None, &[("NARAD_ADDR", "e:3")]), at("f:4"));
        assert_eq!(home.goes_to(None, Some("dev"), &[]), at("d:2"));
        assert_eq!(home.goes_to(Some("f:4"), Some("dev"), &[]), at("f:4"));
        for variable in VARIABLES {
            let refused = usage(home.goes_to(None, Some("dev"), &[(variable, "x")]));
            assert!(refused.starts_with(&format!("--ctx dev: {variable} is set as well")), "{refused}");
        }
        assert!(usage(home.goes_to(None, Some("nosuch"), &[])).contains("there are dev, prod"));
        assert_eq!(endpoint(None, None, &|_| None), at("127.0.0.1:7942"), "without a home");
        assert!(usage(endpoint(None, Some("dev"), &|_| None)).contains("NARAD_CONFIG_DIR"));
    }
}
