//! The seccomp profile of a container: the system calls that container engines permit by default.
//!
//! It permits by name and refuses everything else with `EPERM`, newer system calls included. It is
//! Docker's default profile (moby/profiles, `seccomp/default.json`) for [`super::CAPABILITIES`],
//! without rules for other capabilities. Runtimes ignore names that an architecture does not have.

use serde_json::{Value, json};

/// Permitted whatever the arguments.
const ALLOWED: &str = "
    accept accept4 access adjtimex alarm arch_prctl arm_fadvise64_64 arm_sync_file_range bind
    breakpoint brk cacheflush cachestat capget capset chdir chmod chown chown32 chroot
    clock_adjtime clock_adjtime64 clock_getres clock_getres_time64 clock_gettime clock_gettime64
    clock_nanosleep clock_nanosleep_time64 close close_range connect copy_file_range creat dup
    dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_pwait2 epoll_wait eventfd
    eventfd2 execve execveat exit exit_group faccessat faccessat2 fadvise64 fadvise64_64 fallocate
    fanotify_mark fchdir fchmod fchmodat fchmodat2 fchown fchown32 fchownat
    fdatasync fgetxattr flistxattr flock fork fremovexattr fsetxattr fstat fstat64 fstatat64
    fstatfs fstatfs64 fsync ftruncate ftruncate64 futex futex_requeue futex_time64 futex_wait
    futex_waitv futex_wake futimesat get_robust_list get_thread_area getcpu getcwd getdents
    getdents64 getegid getegid32 geteuid geteuid32 getgid getgid32 getgroups getgroups32 getitimer
    getpeername getpgid getpgrp getpid getppid getpriority getrandom getresgid getresgid32
    getresuid getresuid32 getrlimit getrusage getsid getsockname getsockopt gettid gettimeofday
    getuid getuid32 getxattr getxattrat inotify_add_watch inotify_init inotify_init1
    inotify_rm_watch io_cancel io_destroy io_getevents io_pgetevents io_pgetevents_time64 io_setup
    io_submit ioctl ioprio_get ioprio_set ipc kill landlock_add_rule landlock_create_ruleset
    landlock_restrict_self lchown lchown32 lgetxattr link linkat listen listmount listxattr
    listxattrat llistxattr _llseek lremovexattr lseek lsetxattr lstat lstat64 madvise
    map_shadow_stack membarrier memfd_create memfd_secret mincore mkdir mkdirat mknod mknodat
    mlock mlock2 mlockall mmap mmap2 modify_ldt mprotect mq_getsetattr mq_notify mq_open
    mq_timedreceive mq_timedreceive_time64 mq_timedsend mq_timedsend_time64 mq_unlink mremap mseal
    msgctl msgget msgrcv msgsnd msync munlock munlockall munmap name_to_handle_at nanosleep
    newfstatat _newselect open openat openat2 pause pidfd_open pidfd_send_signal pipe pipe2
    pkey_alloc pkey_free pkey_mprotect poll ppoll ppoll_time64 prctl pread64 preadv preadv2
    prlimit64 process_mrelease process_vm_readv process_vm_writev pselect6 pselect6_time64 ptrace
    pwrite64 pwritev pwritev2 read readahead readdir readlink readlinkat readv recv recvfrom
    recvmmsg recvmmsg_time64 recvmsg remap_file_pages removexattr removexattrat rename renameat
    renameat2 restart_syscall rmdir rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigqueueinfo
    rt_sigreturn rt_sigsuspend rt_sigtimedwait rt_sigtimedwait_time64 rt_tgsigqueueinfo
    sched_get_priority_max sched_get_priority_min sched_getaffinity sched_getattr sched_getparam
    sched_getscheduler sched_rr_get_interval sched_rr_get_interval_time64 sched_setaffinity
    sched_setattr sched_setparam sched_setscheduler sched_yield seccomp select semctl semget semop
    semtimedop semtimedop_time64 send sendfile sendfile64 sendmmsg sendmsg sendto set_robust_list
    set_thread_area set_tid_address set_tls setfsgid setfsgid32 setfsuid setfsuid32 setgid
    setgid32 setgroups setgroups32 setitimer setpgid setpriority setregid setregid32 setresgid
    setresgid32 setresuid setresuid32 setreuid setreuid32 setrlimit setsid setsockopt setuid
    setuid32 setxattr setxattrat shmat shmctl shmdt shmget shutdown sigaction sigaltstack signal
    signalfd signalfd4 sigpending sigprocmask sigreturn sigsuspend socketcall socketpair splice
    stat stat64 statfs statfs64 statmount statx symlink symlinkat sync sync_file_range
    sync_file_range2 syncfs sysinfo tee tgkill time timer_create timer_delete timer_getoverrun
    timer_gettime timer_gettime64 timer_settime timer_settime64 timerfd_create timerfd_gettime
    timerfd_gettime64 timerfd_settime timerfd_settime64 times tkill truncate truncate64 ugetrlimit
    umask uname unlink unlinkat uretprobe utime utimensat utimensat_time64 utimes vfork vmsplice
    wait4 waitid waitpid write writev
";

/// `personality` may set Linux, or 32-bit Linux, with or without `UNAME26`, and tell what is set.
const PERSONALITIES: [u64; 5] = [0, 0x8, 0x2_0000, 0x2_0008, 0xffff_ffff];

/// The `CLONE_NEW…` flags.
const CLONE_NAMESPACES: u64 = 0x7e02_0000;

/// `AF_ALG`, the kernel's cryptography, and `AF_VSOCK`, a hypervisor's host, are refused.
const SOCKETS: [(&str, u64); 3] = [("SCMP_CMP_LT", 38), ("SCMP_CMP_EQ", 39), ("SCMP_CMP_GT", 40)];

/// The first of the commands of fcntl(2) that only Linux has.
const F_LINUX_SPECIFIC_BASE: u64 = 1024;

/// `F_SETLEASE` is 1024, and `F_SETDELEG` (Linux 6.19) 1040. Each command between them has one of
/// these bits set. Where containers share a mount of the image, one that opens a file would wait for
/// the end of another's lease.
const FCNTLS_WITHOUT_LEASES: [u64; 4] = [1, 2, 4, 8];

const ENOSYS: u32 = 38;
const EPERM: u32 = 1;

/// The `linux.seccomp` of the OCI runtime specification for a [`std::env::consts::ARCH`].
/// `is_root_shared`: other containers have the same mount of the image.
pub(super) fn profile(architecture: &str, is_root_shared: bool) -> Value {
    let architectures: &[&str] = match architecture {
        // Without x32, which distributions' kernels do not run: crun 1.8 compiles the profile at
        // every start, in 2 ms of processor time for x86_64, 7 with x86, 13 with x32 as well.
        "x86_64" => &["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"],
        "aarch64" => &["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"],
        // Runtimes take their own.
        _ => &[],
    };
    let allow = |name: &str, op: &str, value: u64| {
        let argument = json!({"index": 0, "value": value, "op": op});
        json!({"names": [name], "action": "SCMP_ACT_ALLOW", "args": [argument]})
    };
    let mut rules = vec![
        json!({"names": ALLOWED.split_whitespace().collect::<Vec<_>>(), "action": "SCMP_ACT_ALLOW"}),
        allow("clone", "SCMP_CMP_MASKED_EQ", CLONE_NAMESPACES),
        // Its flags are in memory, which no filter sees. Callers fall back to `clone`.
        json!({"names": ["clone3"], "action": "SCMP_ACT_ERRNO", "errnoRet": ENOSYS}),
    ];
    rules.extend(PERSONALITIES.map(|value| allow("personality", "SCMP_CMP_EQ", value)));
    rules.extend(SOCKETS.map(|(op, value)| allow("socket", op, value)));
    let fcntl = ["fcntl", "fcntl64"];
    if is_root_shared {
        // The kernel takes the lower half of the register.
        let allow = |mask: u64, masked: u64| {
            let (index, op) = (1, "SCMP_CMP_MASKED_EQ");
            let argument = json!({"index": index, "value": mask, "valueTwo": masked, "op": op});
            json!({"names": fcntl, "action": "SCMP_ACT_ALLOW", "args": [argument]})
        };
        rules.push(allow(0xffff_ffff - (F_LINUX_SPECIFIC_BASE - 1), 0));
        let bits = FCNTLS_WITHOUT_LEASES.iter();
        rules.extend(bits.map(|bit| allow(0xffff_fff0 | bit, F_LINUX_SPECIFIC_BASE | bit)));
    } else {
        rules.push(json!({"names": fcntl, "action": "SCMP_ACT_ALLOW"}));
    }
    json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": EPERM,
        "architectures": architectures,
        "syscalls": rules,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_in_order_and_none_is_one_of_those_refused() {
        let names: Vec<&str> = ALLOWED.split_whitespace().collect();
        let key = |name: &&str| name.trim_start_matches('_').to_owned();
        assert!(names.is_sorted_by_key(key), "not in order");
        let refused = "add_key bpf clone clone3 delete_module fcntl fcntl64 finit_module fsopen init_module \
            io_uring_setup kexec_load keyctl mount move_mount open_by_handle_at open_tree \
            perf_event_open personality pivot_root quotactl reboot request_key setns settimeofday \
            socket swapon syslog umount2 unshare userfaultfd";
        for name in refused.split_whitespace() {
            assert!(!names.contains(&name), "{name}");
        }
        // What a dynamic program, a shell and a server cannot do without.
        for name in
            "execve mmap openat2 rseq futex epoll_wait accept4 statx chroot wait4".split(' ')
        {
            assert!(names.contains(&name), "{name}");
        }
    }

    /// A container's lease on a file of the image kept all others of the same mount waiting.
    #[test]
    fn only_leases_are_refused_where_the_root_is_shared() {
        let is_allowed = |profile: &Value, command: u64| {
            let rules = profile["syscalls"].as_array().unwrap().iter();
            let mut of_fcntl = rules.filter(|rule| rule["names"][0] == "fcntl");
            of_fcntl.any(|rule| match rule["args"].get(0) {
                None => true,
                Some(it) => {
                    assert_eq!(
                        (&it["index"], &it["op"]),
                        (&json!(1), &json!("SCMP_CMP_MASKED_EQ"))
                    );
                    command & it["value"].as_u64().unwrap() == it["valueTwo"].as_u64().unwrap()
                }
            })
        };
        let (own, shared) = (profile("x86_64", false), profile("x86_64", true));
        for command in 0..1041 {
            assert!(is_allowed(&own, command), "{command}");
            let is_lease = command == 1024 || command == 1040;
            assert_eq!(is_allowed(&shared, command), !is_lease, "{command}");
            assert_eq!(is_allowed(&shared, command | 1 << 32), !is_lease, "{command}");
        }
    }

    #[test]
    fn each_architecture_has_its_32_bit_one() {
        let of = |architecture| profile(architecture, true)["architectures"].clone();
        assert_eq!(of("x86_64"), json!(["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"]));
        assert_eq!(of("aarch64"), json!(["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM"]));
    }
}
