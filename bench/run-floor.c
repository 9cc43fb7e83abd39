/* Starts a container with the least system calls that giving it a mount of its own takes:
 *
 *     run-floor MOUNTED ROOTFS RUNTIME [ARG...]
 *
 * clones the mount MOUNTED to the directory ROOTFS, runs RUNTIME to its end and unmounts ROOTFS.
 * What `cofolio run` of a mounted image takes beyond this is Cofolio's own; see bench/run. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static int failed(const char *what) {
    perror(what);
    return 125;
}

int main(int argc, char **argv) {
    pid_t runtime;
    int tree, status;
    if (argc < 4)
        return 2;
    /* The numbers of linux/mount.h, which old C libraries lack: OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH. */
    tree = syscall(SYS_open_tree, AT_FDCWD, argv[1], 1 | O_CLOEXEC);
    if (tree < 0)
        return failed(argv[1]);
    if (syscall(SYS_move_mount, tree, "", AT_FDCWD, argv[2], 4) < 0)
        return failed(argv[2]);
    if (posix_spawnp(&runtime, argv[3], NULL, NULL, argv + 3, environ) != 0)
        return failed(argv[3]);
    waitpid(runtime, &status, 0);
    if (umount2(argv[2], MNT_DETACH | UMOUNT_NOFOLLOW) < 0)
        return failed(argv[2]);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}
