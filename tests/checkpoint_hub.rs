//! Fetching from a hub: a small HTTP server on loopback that answers as the hub does.

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use inferwall::engine::model::hub::Hub;

const REPO: &str = "someone/tiny";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// Serves the files of a fixture as a repository, and keeps the requests it got.
struct Server {
    address: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

#[derive(Debug, Clone, Default)]
struct Request {
    path: String,
    headers: HashMap<String, String>,
}

impl Server {
    fn start(folder: &Path) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (folder, seen) = (folder.to_path_buf(), Arc::clone(&requests));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (folder, seen) = (folder.clone(), Arc::clone(&seen));
                std::thread::spawn(move || serve(stream, &folder, &seen));
            }
        });
        Self { address, requests }
    }

    fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }
}

fn serve(mut stream: TcpStream, folder: &Path, seen: &Mutex<Vec<Request>>) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return;
        }
        let path = line.split(' ').nth(1).unwrap().to_string();
        let mut request = Request { path, ..Request::default() };
        loop {
            let mut header = String::new();
            reader.read_line(&mut header).unwrap();
            match header.trim_end().split_once(": ") {
                Some((name, value)) => request.headers.insert(name.to_lowercase(), value.to_string()),
                None => break,
            };
        }
        let answer = answer(&request, folder);
        seen.lock().unwrap().push(request);
        if stream.write_all(&answer).is_err() {
            return;
        }
    }
}

fn answer(request: &Request, folder: &Path) -> Vec<u8> {
    if request.path == format!("/api/models/{REPO}/revision/main") {
        let names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
        let siblings: Vec<_> = names.map(|name| serde_json::json!({ "rfilename": name })).collect();
        let body = serde_json::json!({ "siblings": siblings, "sha": COMMIT }).to_string();
        return format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes();
    }
    let name = request.path.strip_prefix(&format!("/{REPO}/resolve/main/"));
    let Some(body) = name.and_then(|name| std::fs::read(folder.join(name)).ok()) else {
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n".to_vec();
    };
    let range = request.headers["range"].strip_prefix("bytes=").unwrap();
    let (start, end) = range.split_once('-').unwrap();
    let start: usize = start.parse().unwrap();
    let end = end.parse().map_or(body.len(), |end: usize| end + 1);
    let mut bytes = format!(
        "HTTP/1.1 206 Partial Content\r\nContent-Length: {}\r\nContent-Range: bytes {start}-{}/{}\r\n\
         ETag: \"{}\"\r\nX-Repo-Commit: {COMMIT}\r\n\r\n",
        end - start,
        end - 1,
        body.len(),
        etag(name.unwrap()),
    )
    .into_bytes();
    bytes.extend(&body[start..end]);
    bytes
}

fn etag(name: &str) -> String {
    name.chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect()
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

#[test]
fn a_repository_is_fetched_once_and_then_found() {
    for source in ["hybrid-tiny", "hybrid-tiny-sharded"] {
        let server = Server::start(&fixture(source));
        let cache = tempfile::tempdir().unwrap();
        let hub = Hub::new(cache.path(), &server.address, Some("secret".into())).unwrap();
        assert_eq!(hub.find(REPO, None), None);
        let folder = hub.fetch(REPO, None, false).unwrap();
        assert_eq!(hub.find(REPO, None).as_ref(), Some(&folder));
        assert_eq!(hub.find(REPO, Some(COMMIT)).as_ref(), Some(&folder));
        for entry in std::fs::read_dir(fixture(source)).unwrap() {
            let name = entry.unwrap().file_name();
            let wanted = !name.to_str().unwrap().starts_with("expected");
            assert_eq!(folder.join(&name).exists(), wanted, "{name:?}");
            if wanted {
                let original = std::fs::read(fixture(source).join(&name)).unwrap();
                assert!(std::fs::read(folder.join(&name)).unwrap() == original, "{name:?}");
            }
        }
        let requests = server.requests();
        assert!(requests.iter().all(|request| request.headers["authorization"] == "Bearer secret"));
        hub.fetch(REPO, None, false).unwrap();
        assert_eq!(server.requests().len(), requests.len() + 1, "only the list of files is asked for again");
    }
}

#[test]
fn an_interrupted_download_goes_on_where_it_stopped() {
    let server = Server::start(&fixture("hybrid-tiny"));
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(cache.path(), &server.address, None).unwrap();
    let whole = std::fs::read(fixture("hybrid-tiny").join("model.safetensors")).unwrap();
    let blobs = cache.path().join("models--someone--tiny/blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let done = whole.len() / 3;
    std::fs::write(blobs.join(format!("{}.part", etag("model.safetensors"))), &whole[..done]).unwrap();

    let folder = hub.fetch(REPO, None, false).unwrap();
    assert!(std::fs::read(folder.join("model.safetensors")).unwrap() == whole);
    let ranges: Vec<String> = server
        .requests()
        .iter()
        .filter(|request| request.path.ends_with("/model.safetensors"))
        .map(|request| request.headers["range"].clone())
        .collect();
    assert_eq!(ranges, ["bytes=0-0".to_string(), format!("bytes={done}-")]);
    assert!(!server.requests()[0].headers.contains_key("authorization"));
}

#[test]
fn a_missing_repository_and_a_missing_server_are_told_apart() {
    let server = Server::start(&fixture("hybrid-tiny"));
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(cache.path(), &server.address, None).unwrap();
    let missing = hub.fetch("someone/else", None, false).unwrap_err();
    assert_eq!(missing.exit_code(), 2);
    assert!(missing.to_string().contains("someone/else") && missing.hint().contains("HF_TOKEN"), "{missing}");

    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let hub = Hub::new(cache.path(), &format!("http://{closed}"), None).unwrap();
    let unreachable = hub.fetch(REPO, None, false).unwrap_err();
    assert_eq!(unreachable.exit_code(), 1);
    assert!(unreachable.hint().contains("network"), "{}", unreachable.hint());
    assert_eq!(Hub::new(cache.path(), "huggingface.co", None).unwrap_err().exit_code(), 2);
}

#[test]
fn a_repository_without_weights_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("config.json"), "{}").unwrap();
    std::fs::write(folder.path().join("model.gguf"), "GGUF").unwrap();
    let server = Server::start(folder.path());
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::new(cache.path(), &server.address, None).unwrap();
    let error = hub.fetch(REPO, None, false).unwrap_err();
    assert!(error.to_string().contains("0 .safetensors"), "{error}");
    assert!(hub.find(REPO, None).is_none());
}
