// Runs a program with restricted rights: confine WORDS... -- PROGRAM ARGUMENTS...
//   r=PATH   the program may read and execute the files below this path; w=PATH: it may also change them
//   alone    the program may start no other process
// A program may reach no other file (Landlock) and no network (seccomp). With the only word "probe", this program
// prints the mechanisms that the system has. A mechanism that the system lacks is left out.
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#if defined(__x86_64__)
constexpr std::uint32_t ARCHITECTURE = AUDIT_ARCH_X86_64;
#elif defined(__aarch64__)
constexpr std::uint32_t ARCHITECTURE = AUDIT_ARCH_AARCH64;
#else
constexpr std::uint32_t ARCHITECTURE = 0;  // no filter of system calls
#endif

// Landlock's interface and io_uring_setup, which headers of older systems lack.
constexpr int CREATE_RULESET = 444, ADD_RULE = 445, RESTRICT_SELF = 446, IO_URING = 425;
struct Ruleset {
    std::uint64_t files;
};
struct __attribute__((packed)) PathRule {
    std::uint64_t allowed;
    std::int32_t directory;
};
constexpr std::uint64_t EXECUTE = 1, READ_FILE = 4, READ_DIRECTORY = 8, OF_FILES = 0x4007;  // with WRITE_FILE, TRUNCATE
constexpr std::uint64_t READS = EXECUTE | READ_FILE | READ_DIRECTORY;

long landlock_version() { return syscall(CREATE_RULESET, nullptr, 0, 1); }

std::uint64_t all_rights(long version) {  // rights that version 1 has, then REFER, TRUNCATE and IOCTL_DEV
    return version < 2 ? 0x1fff : version < 3 ? 0x3fff : version < 5 ? 0x7fff : 0xffff;
}

bool restrict_files(const std::vector<const char*>& paths) {
    const long version = landlock_version();
    if (version < 1) return false;
    const Ruleset handled = {all_rights(version)};
    const int rules = syscall(CREATE_RULESET, &handled, sizeof handled, 0);
    if (rules < 0) return false;
    for (const char* path : paths) {
        const int place = open(path + 2, O_PATH | O_CLOEXEC);
        struct stat status;
        if (place < 0 || fstat(place, &status)) continue;  // not every system has every folder
        std::uint64_t allowed = *path == 'w' ? handled.files : READS;
        if (!S_ISDIR(status.st_mode)) allowed &= OF_FILES;
        const PathRule rule = {allowed & handled.files, place};
        if (syscall(ADD_RULE, rules, 1, &rule, 0)) return false;
        close(place);
    }
    return syscall(RESTRICT_SELF, rules, 0) == 0;
}

// Makes system calls fail: always calls for networks, and with `alone` also calls that start processes. Threads may
// start, as AddressSanitizer needs one. clone3 fails with ENOSYS, after which the C library calls clone.
bool restrict_calls(bool alone) {
    if (!ARCHITECTURE) return false;
    std::vector<sock_filter> rules;
    const auto add = [&](std::uint16_t code, std::uint32_t value, std::uint8_t yes = 0, std::uint8_t no = 0) {
        rules.push_back({code, yes, no, value});
    };
    const auto load = [&](std::uint32_t offset) { add(BPF_LD | BPF_W | BPF_ABS, offset); };
    const auto refuse = [&](std::uint32_t call, std::uint32_t error) {
        add(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 1);
        add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error);
    };
    load(offsetof(seccomp_data, arch));
    add(BPF_JMP | BPF_JEQ | BPF_K, ARCHITECTURE, 1, 0);
    add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    load(offsetof(seccomp_data, nr));
    add(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1);  // calls of the x32 interface
    add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    for (int call : {SYS_socket, SYS_socketpair, SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, IO_URING}) {
        refuse(call, EPERM);
    }
    if (alone) {
#ifdef SYS_fork
        refuse(SYS_fork, EPERM);
        refuse(SYS_vfork, EPERM);
#endif
        refuse(SYS_clone3, ENOSYS);
        add(BPF_JMP | BPF_JEQ | BPF_K, SYS_clone, 0, 3);
        load(offsetof(seccomp_data, args));  // the low half: all systems above have their low byte first
        add(BPF_JMP | BPF_JSET | BPF_K, CLONE_THREAD, 1, 0);
        add(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM);
    }
    add(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    const sock_fprog program = {static_cast<unsigned short>(rules.size()), rules.data()};
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

int main(int argc, char** argv) {
    std::vector<const char*> paths;
    bool alone = false, probe = false;
    int i = 1;
    for (; i < argc && std::strcmp(argv[i], "--"); ++i) {
        if (argv[i][1] == '=') paths.push_back(argv[i]);
        alone |= !std::strcmp(argv[i], "alone");
        probe |= !std::strcmp(argv[i], "probe");
    }
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    const bool files = restrict_files(paths), calls = restrict_calls(alone);
    if (probe) std::printf("%s%s", files ? "files " : "", calls ? "calls " : "");
    if (i + 1 >= argc) return probe ? 0 : 2;
    execv(argv[i + 1], argv + i + 1);
    std::perror(argv[i + 1]);
    return 127;
}
