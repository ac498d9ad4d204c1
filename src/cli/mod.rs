pub fn main(_: Vec<String>) -> std::process::ExitCode {
    std::process::ExitCode::SUCCESS
}
