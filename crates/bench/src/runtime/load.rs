//! The usual load of an image: how its server is started, and what asks it for something.

use std::process::{Command, Stdio};

use anyhow::Result;
use cofolio_node::container::bundle::ImageConfig;

use cofolio_cli::exit::{Exit, Fail};

/// What a container of an image does while it is measured.
#[derive(Debug)]
pub(super) struct Load {
    /// As `--load` takes it.
    pub(super) name: &'static str,
    /// Words by which an image's name or the program that it starts is recognised.
    pub(super) images: &'static [&'static str],
    /// What runs in the container.
    pub(super) command: Start,
    /// Added to the image's environment.
    pub(super) env: &'static [&'static str],
    /// Shown inside at [`FILE`].
    pub(super) file: Option<&'static str>,
    /// The port that is open when it is ready.
    pub(super) port: Port,
    /// What fills its database, in a container that is started for that before.
    pub(super) prepare: &'static [&'static str],
    /// What succeeds when it can answer, where an open port does not tell.
    pub(super) ready: &'static [&'static str],
    pub(super) drive: Drive,
    /// The Debian package that has the client.
    pub(super) package: &'static str,
}

/// What runs in a container.
#[derive(Debug)]
pub(super) enum Start {
    /// What the image starts.
    Image,
    /// The same, with more arguments.
    With(&'static [&'static str]),
    /// A shell script, which finds what the image starts in its arguments.
    Script(&'static str),
    /// This.
    Instead(&'static [&'static str]),
}

/// A TCP port on the container's own loopback.
#[derive(Debug)]
pub(super) enum Port {
    Number(u16),
    /// The only one that the image says it listens on.
    Exposed,
}

/// Who asks the container for something, until it is measured.
#[derive(Debug)]
pub(super) enum Drive {
    /// A program that goes on by itself, outside the container's cgroup and in its network.
    Program(&'static [&'static str]),
    /// This process fetches these pages in turn.
    Fetch(&'static [&'static str]),
    /// Nobody: it has work of its own.
    Itself,
}

/// Where [`Load::file`] is inside.
const FILE: &str = "/cofolio-bench";

/// sysbench with its own tables and transactions. At a rate, because what a database writes is in the page cache, too: it
/// must not depend on how fast the machine is.
macro_rules! sysbench {
    (pgsql, $($step:literal),+) => {
        sysbench!("pgsql", "--pgsql-host=127.0.0.1", "--pgsql-user=postgres", "--pgsql-db=postgres", $($step),+)
    };
    (mysql, $($step:literal),+) => {
        sysbench!("mysql", "--mysql-host=127.0.0.1", "--mysql-user=root", $($step),+)
    };
    ($driver:literal, $($option:literal),+) => {
        &[
            "sysbench",
            "oltp_read_write",
            concat!("--db-driver=", $driver),
            "--table-size=10000",
            "--threads=4",
            "--rate=100",
            "--time=3600",
            $($option),+
        ]
    };
}

/// Computes for ever; listens as soon as it has a first result.
const TENSORFLOW: &str = r#"
import socket, time
import tensorflow as tf
generator = tf.random.Generator.from_seed(1)
model = tf.keras.Sequential([tf.keras.layers.Dense(256, activation="relu"), tf.keras.layers.Dense(10)])
model.compile(optimizer="adam", loss="mse")
ready = None
while True:
    a, b = generator.normal((512, 256)), generator.normal((512, 10))
    model.train_on_batch(a, b)
    tf.linalg.matmul(a, a, transpose_b=True).numpy()
    ready = ready or socket.create_server(("127.0.0.1", 8000))
    time.sleep(0.05)
"#;

const NGINX: Drive = Drive::Program(&[
    "wrk",
    "--threads",
    "2",
    "--connections",
    "32",
    "--duration",
    "1h",
    "http://127.0.0.1/",
]);

/// The loads of the reference (redis-benchmark, sysbench, wrk, tomcat's own entry point, a program of TensorFlow's), and
/// one for whatever speaks HTTP.
pub(super) const LOADS: [Load; 8] = [
    Load {
        name: "redis",
        images: &["redis", "redis-server", "valkey"],
        port: Port::Number(6379),
        // Its own tests, one after the other and again; fewer requests of each, so that all get their turn.
        drive: Drive::Program(&["redis-benchmark", "-q", "-l", "-n", "10000"]),
        package: "redis-tools",
        ..PLAIN
    },
    Load {
        name: "postgres",
        images: &["postgres", "postgresql"],
        env: &["POSTGRES_HOST_AUTH_METHOD=trust"],
        port: Port::Number(5432),
        prepare: sysbench!(pgsql, "prepare"),
        ready: sysbench!(pgsql, "run", "--events=1"),
        drive: Drive::Program(sysbench!(pgsql, "run")),
        package: "sysbench",
        ..PLAIN
    },
    Load {
        name: "mysql",
        images: &["mysql", "mysqld", "mariadb", "mariadbd"],
        env: &["MYSQL_ALLOW_EMPTY_PASSWORD=1", "MARIADB_ALLOW_EMPTY_ROOT_PASSWORD=1"],
        command: Start::With(&["--init-file=/cofolio-bench"]),
        file: Some("CREATE DATABASE IF NOT EXISTS sbtest;\n"),
        port: Port::Number(3306),
        prepare: sysbench!(mysql, "prepare"),
        ready: sysbench!(mysql, "run", "--events=1"),
        drive: Drive::Program(sysbench!(mysql, "run")),
        package: "sysbench",
    },
    // As the image has it: Debian's and nginx' own configurations turn sendfile on.
    Load {
        name: "nginx",
        images: &["nginx"],
        port: Port::Number(80),
        drive: NGINX,
        package: "wrk",
        ..PLAIN
    },
    Load {
        name: "nginx-no-sendfile",
        command: Start::Script(
            "sed -i 's/sendfile[[:space:]]*on;/sendfile off;/' /etc/nginx/nginx.conf && exec \"$@\"",
        ),
        port: Port::Number(80),
        drive: NGINX,
        package: "wrk",
        ..PLAIN
    },
    Load {
        name: "tomcat",
        images: &["tomcat", "catalina.sh"],
        port: Port::Number(8080),
        drive: Drive::Fetch(&["/"]),
        ..PLAIN
    },
    Load {
        name: "tensorflow",
        images: &["tensorflow"],
        command: Start::Instead(&["python3", "-c", TENSORFLOW]),
        port: Port::Number(8000),
        drive: Drive::Itself,
        ..PLAIN
    },
    Load { name: "http", drive: Drive::Fetch(&["/"]), ..PLAIN },
];

const PLAIN: Load = Load {
    name: "",
    images: &[],
    command: Start::Image,
    env: &[],
    file: None,
    port: Port::Exposed,
    prepare: &[],
    ready: &[],
    drive: Drive::Itself,
    package: "",
};

impl Load {
    /// The one that was asked for, or the one that the image's name or program tells.
    pub(super) fn find(
        wanted: Option<&str>,
        name: &str,
        config: &ImageConfig,
    ) -> Result<&'static Load> {
        let names = LOADS.map(|load| load.name).join(", ");
        if let Some(wanted) = wanted {
            let found = LOADS.iter().find(|load| load.name == wanted);
            return found
                .ok_or_else(|| Fail::usage(format!("--load {wanted}: not one of {names}")).into());
        }
        let last = |path: &str| path.rsplit('/').next().unwrap_or_default().to_owned();
        let mut words = vec![last(name.split([':', '@']).next().unwrap_or_default())];
        words.extend(config.command().iter().map(|word| last(word)));
        let known = |load: &&Load| words.iter().any(|word| load.images.contains(&word.as_str()));
        LOADS.iter().find(known).ok_or_else(|| {
            let fail = Fail::usage(format!("no load is known for an image like {name}"));
            fail.hint(format!("name one with --load: {names}")).into()
        })
    }

    /// The programs that it needs on this machine are there.
    pub(super) fn check(&self) -> Result<()> {
        let Drive::Program([program, ..]) = self.drive else { return Ok(()) };
        let path = std::env::var_os("PATH").unwrap_or_default();
        if std::env::split_paths(&path).any(|dir| dir.join(program).is_file()) {
            return Ok(());
        }
        let fail =
            Fail::new(Exit::Missing, format!("--load {}: {program} is not installed", self.name));
        Err(fail.hint(format!("Debian has it in the package {}", self.package)).into())
    }

    /// Brings its client into memory, so that no container is charged for it and the machine does not grow by it.
    pub(super) fn warm(&self) {
        if let Drive::Program([program, ..]) = self.drive {
            // What it says, and whether it knows the option, is all the same.
            let _ = Command::new(program).arg("--version").stdin(Stdio::null()).output();
        }
    }

    /// The command line in the container.
    pub(super) fn command(&self, config: &ImageConfig) -> Vec<String> {
        let words =
            |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>();
        match self.command {
            Start::Image => config.command(),
            Start::With(more) => [config.command(), words(more)].concat(),
            Start::Script(script) => {
                [words(&["sh", "-c", script, "sh"]), config.command()].concat()
            }
            Start::Instead(command) => words(command),
        }
    }

    /// Where [`Load::file`] is inside.
    pub(super) fn file_target() -> &'static str {
        FILE
    }

    /// The port number.
    pub(super) fn port(&self, config: &ImageConfig) -> Result<u16> {
        if let Port::Number(port) = self.port {
            return Ok(port);
        }
        let exposed: Vec<_> = config.exposed_ports().collect();
        let [port] = exposed[..] else {
            let what =
                format!("--load {}: the image exposes {} ports, not one", self.name, exposed.len());
            return Err(Fail::usage(what).into());
        };
        let number = port.trim_end_matches("/tcp").parse();
        number.map_err(|_| {
            Fail::usage(format!("--load {}: port {port} is none of TCP", self.name)).into()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guess(name: &str, command: &str) -> Option<&'static str> {
        let config = format!(r#"{{"config": {{"Cmd": {command}}}}}"#);
        let config = ImageConfig::parse(&config).unwrap();
        Load::find(None, name, &config).ok().map(|load| load.name)
    }

    #[test]
    fn names_and_programs_tell() {
        assert_eq!(guess("registry.example/team/redis:7", r#"["x"]"#), Some("redis"));
        assert_eq!(
            guess("cache@sha256:00", r#"["/usr/bin/redis-server", "--port", "1"]"#),
            Some("redis")
        );
        assert_eq!(guess("db", r#"["/entry.sh", "mariadbd"]"#), Some("mysql"));
        assert_eq!(guess("web", r#"["nginx", "-g", "daemon off;"]"#), Some("nginx"));
        assert_eq!(guess("tensorflow:2", "[]"), Some("tensorflow"));
        assert_eq!(guess("debian:13", r#"["bash"]"#), None);
    }

    #[test]
    fn an_unknown_image_or_load_lists_them_all() {
        let config = ImageConfig::default();
        for (wanted, name) in [(None, "debian"), (Some("x"), "redis")] {
            let error = Load::find(wanted, name, &config).unwrap_err();
            let fail = error.downcast_ref::<Fail>().unwrap();
            let said = format!("{fail:?}");
            assert!(LOADS.iter().all(|load| said.contains(load.name)), "{said}");
        }
    }

    #[test]
    fn a_port_that_is_not_told_must_be_the_only_one() {
        let http = Load::find(Some("http"), "", &ImageConfig::default()).unwrap();
        for (ports, port) in [
            (r#""80/tcp": {}"#, Some(80)),
            ("", None),
            (r#""1/tcp": {}, "2/tcp": {}"#, None),
            (r#""9/udp": {}"#, None),
        ] {
            let config =
                ImageConfig::parse(&format!(r#"{{"config": {{"ExposedPorts": {{{ports}}}}}}}"#))
                    .unwrap();
            assert_eq!(http.port(&config).ok(), port, "{ports}");
        }
    }
}
