"""Made-up answers of the daemon's API, the same ones at every start."""

import hashlib
import random

PAGE = 4096
NOW = 1_795_638_168
BASES = ["alpine", "debian", "ubi", "distroless"]
APPS = [
    "redis",
    "postgres",
    "nginx",
    "tomcat",
    "mysql",
    "node",
    "python",
    "tensorflow",
    "golang",
    "rabbitmq",
]
HOSTILE = [
    '<img src=x onerror="document.title=1">',
    "<script>document.body.remove()</script>",
    '&lt;b&gt; &amp; "quoted"',
    "registry.example.com/team/" + "very-long-name-" * 16 + ":latest",
    "rtl\u202etxt.exe",
    "esc\x1b[2J\x07",
    "",
    "日本語:最新",
]


def digest(*words):
    return hashlib.sha256(repr(words).encode()).hexdigest()


class Fixture:
    # How old a report is when it is answered.
    late_seconds = 2

    """Answers for `images` images and `containers` containers, in `domains` trust domains."""

    def __init__(self, images, containers, domains=1, hostile=False, points=1440, seed=1):
        self.hostile = hostile
        rng = self.rng = random.Random(seed)
        pages = lambda low, high: rng.randint(low, high) * PAGE
        self.domains = [
            ["default", "ci", "tenant-b", "<b>tenant</b>"][n % 4] + (str(n // 4 or ""))
            for n in range(domains)
        ]
        self.base = {}
        self.images = []
        for n in range(images):
            domain = self.domains[n % domains]
            base = BASES[min(rng.randrange(6), 3)]
            name = (
                HOSTILE[n % len(HOSTILE)]
                if hostile
                else f"{APPS[n % 10]}:{7 + n // 40}.{n // 10 % 4}-{base}"
            )
            shared, private = pages(2000, 30000), pages(10, 60000)
            self.base[digest("image", n)] = base
            names = (
                []
                if n % 11 == 7
                else sorted([name, f"registry.local/{name}"] if n % 5 == 2 else [name])
            )
            used = (shared + private) // PAGE // 3 * PAGE if containers else 0
            self.images.append(
                dict(
                    domain=domain,
                    image=digest("image", n),
                    names=names,
                    objects=rng.randint(80, 12000),
                    bytes=(shared + private) * 3 + rng.randrange(4096),
                    resident_bytes=shared + private,
                    shared_bytes=shared,
                    private_bytes=private,
                    used_bytes=used,
                    saved_bytes=int(used * 0.6),
                    metadata_bytes=pages(20, 900),
                    containers=0,
                )
            )
        self.containers = []
        for n in range(containers):
            uses = rng.sample(self.images, 2 if n % 9 == 4 and images > 1 else 1)
            for image in uses:
                image["containers"] += 1
            shared, private = pages(100, 20000), int(rng.paretovariate(1.2) * 300) * PAGE
            pod = (
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod%s.slice/"
                % digest("pod", n)[:32]
            )
            name = (
                None
                if n % 3
                else (
                    HOSTILE[n % len(HOSTILE)]
                    if hostile
                    else f"{uses[0]['names'][0].split(':')[0] if uses[0]['names'] else 'job'}-{n}"
                )
            )
            cgroup = (
                pod + f"cri-containerd-{digest('c', n)}.scope"
                if n % 2
                else f"/system.slice/cofolio-{n}.scope"
            )
            self.containers.append(
                dict(
                    cgroup=cgroup + (f"/{HOSTILE[n % len(HOSTILE)]}" if hostile else ""),
                    name=name,
                    images=sorted(
                        ({"domain": i["domain"], "image": i["image"]} for i in uses),
                        key=lambda i: i["image"],
                    ),
                    objects=rng.randint(3, 900),
                    used_bytes=shared + private,
                    shared_bytes=shared,
                    private_bytes=private,
                    proportional_bytes=private + shared // 7,
                    commons_bytes=shared // PAGE * 9 // 10 * PAGE,
                    saved_bytes=shared // 3,
                )
            )
        self.unknown = dict(
            openers=12 if containers else 0,
            overflows=0,
            processes=1,
            images=2 if hostile else 0,
            objects=3 if hostile else 0,
            files=0,
            mounts=3 if hostile else 0,
        )
        self.machines = [
            dict(
                name=f"vm{n}",
                image_name=HOSTILE[n % len(HOSTILE)] if hostile else f"{APPS[n % 10]}:7",
                domain=self.domains[n % domains],
                pid=4000 + n,
                attended=True,
                memory_bytes=1 << 30,
                used_bytes=pages(8000, 20000),
                cache_bytes=pages(0, 9000),
                unreturned_bytes=pages(0, 8000),
                emulator_bytes=pages(9000, 12000),
                merged_bytes=pages(0, 60000),
                image_bytes=pages(500, 8000),
                proportional_bytes=pages(30000, 60000),
                zero_bytes=pages(0, 30000),
                recycling=dict(
                    free_bytes=pages(0, 90000),
                    refusal=HOSTILE[n % len(HOSTILE)] if hostile and n % 2 else None,
                ),
            )
            for n in range(containers // 4)
        ]
        self.warnings = ["process 4711: /proc/4711/maps: Permission denied"]
        if hostile:
            self.warnings += HOSTILE
        self.points = points

    def report(self):
        def account(domain):
            mine = [i for i in self.images if i["domain"] == domain]
            total = lambda field: sum(i[field] for i in mine)
            return dict(
                domain=domain,
                objects=total("objects"),
                bytes=total("bytes"),
                resident_bytes=total("resident_bytes"),
                used_bytes=total("used_bytes"),
                shared_bytes=total("used_bytes") // 2,
                saved_bytes=total("saved_bytes"),
                metadata_bytes=total("metadata_bytes"),
            )

        return dict(
            time=NOW,
            residency_age_seconds=4,
            processes_age_seconds=11,
            machine=dict(
                memory_bytes=270_000_001_024,
                available_bytes=141_733_920_768,
                page_cache_bytes=88_046_829_568,
                shared_memory_bytes=94_986_240,
            ),
            domains=[account(d) for d in self.domains],
            images=self.images,
            containers=self.containers,
            unknown=self.unknown,
            warnings=self.warnings,
        )

    def machine_report(self):
        total = lambda field: sum(it[field] for it in self.machines)
        return dict(
            time=NOW,
            machines=self.machines,
            image_bytes=total("image_bytes") // 3,
            pool_bytes=total("merged_bytes") // 4,
            returned_bytes=9 << 30,
            latency=dict(
                p50_ms=1500 if self.machines else None,
                p99_ms=None if self.hostile else 4000,
                bytes=[],
                byte_ms=0,
            ),
        )

    def history(self):
        rng, part, points = random.Random(7), 0.7, []
        now = {
            field: sum(i[field] for i in self.images)
            for field in ("saved_bytes", "resident_bytes", "used_bytes")
        }
        for n in range(self.points):
            part = (
                1
                if n == self.points - 1
                else min(
                    1.1, max(0.2, part + rng.uniform(-0.008, 0.0083) + (0.25 if n == 700 else 0))
                )
            )
            # The daemon was down twice; one point stands alone between.
            if 400 < n < 460 and n != 430:
                continue
            points.append(
                dict(
                    time=NOW - (self.points - n) * 60,
                    page_cache_bytes=int(part * (80 << 30)),
                    **{field: int(bytes * part) for field, bytes in now.items()},
                )
            )
        return dict(interval_seconds=60, period_seconds=10, points=points)

    def sharing(self, domain):
        mine = sorted(
            (i for i in self.images if i["domain"] == domain), key=lambda i: -i["resident_bytes"]
        )

        def common(a, b):
            if a is b:
                return a["resident_bytes"]
            same = self.base[a["image"]] == self.base[b["image"]]
            part = min(a["shared_bytes"], b["shared_bytes"]) // PAGE
            return (part * 4 // 5 if same else part // 40 if part % 3 else 0) * PAGE

        return dict(
            domain=domain,
            images=[dict(image=i["image"], names=i["names"]) for i in mine],
            bytes=[[common(a, b) for b in mine] for a in mine],
        )

    def files(self, domain, image, sort="resident", limit=1000):
        rng = random.Random(image)
        count = 3200
        files = []
        for n in range(count):
            size = int(rng.paretovariate(0.7) * 900)
            name = HOSTILE[n] if self.hostile and 0 < n < len(HOSTILE) else f"lib{n}.so.{n % 7}"
            files.append(
                dict(
                    path=f"/usr/lib/x86_64-linux-gnu/{name}",
                    object=digest("object", image, n),
                    bytes=size,
                    resident_bytes=rng.choice([0, (size + PAGE - 1) // PAGE * PAGE]),
                    users=rng.randrange(20),
                )
            )
        keys = dict(
            resident=lambda f: (-f["resident_bytes"], f["path"]),
            size=lambda f: (-f["bytes"], f["path"]),
            path=lambda f: f["path"],
        )
        return dict(
            domain=domain, image=image, total=count, files=sorted(files, key=keys[sort])[:limit]
        )

    def users(self, domain, object):
        uses = [(c, i) for c in self.containers for i in c["images"] if i["domain"] == domain]
        users = [
            dict(cgroup=c["cgroup"], name=c["name"], image=i["image"], seconds_ago=n * 37 % 10000)
            for n, (c, i) in enumerate(uses)
        ]
        return dict(
            domain=domain,
            object=object,
            bytes=1_920_345,
            resident_bytes=1_921_024,
            users=users[:300],
        )


FIXTURES = {
    "empty": lambda: Fixture(0, 0, points=0),
    "small": lambda: Fixture(3, 0, points=90),
    "medium": lambda: Fixture(30, 5),
    "large": lambda: Fixture(300, 2000),
    "domains": lambda: Fixture(40, 120, domains=4),
    "hostile": lambda: Fixture(24, 40, domains=4, hostile=True, points=1),
}
