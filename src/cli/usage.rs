//! What is wrong with a command line, told as every other error is: a fact and a hint.

use clap::CommandFactory;
use clap::error::ErrorKind;

use super::Arguments;
use crate::Error;

/// What to do where an experiment has to be named.
pub const NO_EXPERIMENT: &str = "`inferwall list` shows all; give one of them";

/// The parser's complaint of what was `typed` as an [`Error`]. Where it is no complaint (help, version) it is printed and
/// the process ends.
pub fn explained(error: &clap::Error, typed: &[String]) -> Error {
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        error.exit();
    }
    let text = error.to_string();
    let fact: Vec<&str> = text.lines().take_while(|line| !line.trim().is_empty()).map(str::trim).collect();
    let fact = fact.join(" ").trim_start_matches("error: ").to_string();
    let tips: Vec<String> =
        text.lines().filter_map(|line| line.trim().strip_prefix("tip: ")).map(tip).collect();
    let hint = if error.kind() == ErrorKind::MissingRequiredArgument && fact.contains("<EXPERIMENT>") {
        NO_EXPERIMENT.to_string()
    } else if tips.is_empty() {
        help(typed)
    } else {
        tips.join("; ")
    };
    Error::invalid(fact, hint)
}

/// `a similar subcommand exists: 'run'` names what may have been meant; other advice stays as it is.
fn tip(text: &str) -> String {
    match text.split_once(": ") {
        Some((what, names)) if what.contains("similar") => {
            format!("did you mean {}?", names.replace('\'', "`").replace(", ", " or "))
        }
        _ => text.replace('\'', "`"),
    }
}

/// The help of the command that was being read.
fn help(typed: &[String]) -> String {
    let program = Arguments::command();
    let (mut at, mut command) = (&program, "inferwall".to_string());
    for word in typed {
        let Some(below) = at.find_subcommand(word) else { break };
        at = below;
        command += &format!(" {word}");
    }
    format!("`{command} --help` shows what can be given")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn of(line: &str) -> (String, String) {
        let error = Arguments::try_parse_from(line.split_whitespace()).unwrap_err();
        let typed: Vec<String> = line.split_whitespace().skip(1).map(str::to_string).collect();
        let error = explained(&error, &typed);
        assert_eq!(error.exit_code(), 2);
        (error.to_string(), error.hint().to_string())
    }

    #[test]
    fn commands_and_flags_that_do_not_exist_offer_the_nearest() {
        let (fact, hint) = of("inferwall runn part1");
        assert_eq!((fact.as_str(), hint.as_str()), ("unrecognized subcommand 'runn'", "did you mean `run`?"));
        let (fact, hint) = of("inferwall fly");
        assert_eq!(fact, "unrecognized subcommand 'fly'");
        assert_eq!(hint, "`inferwall --help` shows what can be given");
        let (fact, hint) = of("inferwall run x --devic cpu");
        assert!(fact.contains("'--devic'") && hint == "did you mean `--device`?", "{fact} {hint}");
    }

    #[test]
    fn values_that_are_missing_or_wrong_are_named() {
        let (fact, hint) = of("inferwall diff a.csv");
        assert!(
            fact.contains("<AFTER>") && hint == "`inferwall diff --help` shows what can be given",
            "{fact}: {hint}"
        );
        let (_, hint) = of("inferwall model quantize m --format gptq");
        assert_eq!(hint, "`inferwall model quantize --help` shows what can be given");
        let (fact, _) = of("inferwall diff a.csv b.csv --format yaml");
        assert!(fact.contains("yaml") && fact.contains("possible values: table, json, csv, md"), "{fact}");
    }
}
