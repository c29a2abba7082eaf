"""Which system calls a confined program may make: a filter of seccomp(2), as classic BPF.

What is not listed fails with EPERM: no program is started, no process made, no socket opened, no file changed, no other
process signalled, traced or looked at.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

# name:number on x86_64:number on aarch64 (asm/unistd_64.h, asm-generic/unistd.h of Linux)
ALLOWED = """
read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 open:2:- openat:257:56 close:3:57
close_range:436:436 stat:4:- fstat:5:80 lstat:6:- newfstatat:262:79 statx:332:291 statfs:137:43 fstatfs:138:44
access:21:- faccessat:269:48 faccessat2:439:439 readlink:89:- readlinkat:267:78 getdents64:217:61 getcwd:79:17
chdir:80:49 fchdir:81:50 lseek:8:62 umask:95:166 mmap:9:222 mprotect:10:226 munmap:11:215 mremap:25:216
madvise:28:233 mincore:27:232 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
rt_sigpending:127:136 rt_sigsuspend:130:133 rt_sigtimedwait:128:137 sigaltstack:131:132 restart_syscall:219:128
poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:-
epoll_pwait:281:22 eventfd2:290:19 pipe:22:- pipe2:293:59 dup:32:23 dup2:33:- dup3:292:24 futex:202:98
futex_waitv:449:449 set_robust_list:273:99 set_tid_address:218:96 rseq:334:293 membarrier:324:283 sched_yield:24:124
sched_getaffinity:204:123 getcpu:309:168 nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113
clock_getres:229:114 gettimeofday:96:169 time:201:- times:100:153 getrusage:98:165 getitimer:36:102 setitimer:38:103
alarm:37:- pause:34:- timer_create:222:107 timer_settime:223:110 timer_gettime:224:108 timer_delete:226:111
timer_getoverrun:225:109 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 getpid:39:172
gettid:186:178 getppid:110:173 getpgrp:111:- getpgid:121:155 getsid:124:156 getuid:102:174 geteuid:107:175
getgid:104:176 getegid:108:177 getgroups:115:158 getresuid:118:148 getresgid:120:150 uname:63:160 sysinfo:99:179
getrandom:318:278 getrlimit:97:163 arch_prctl:158:- exit:60:93 exit_group:231:94 wait4:61:260 waitid:247:95
sendto:44:206 recvfrom:45:207 sendmsg:46:211 recvmsg:47:212 shutdown:48:210 getsockopt:55:209 setsockopt:54:208
getsockname:51:204 getpeername:52:205
"""
# (x86_64, aarch64) of those that are allowed with some values of an argument only
CLONE, CLONE3, KILL, TGKILL, PRLIMIT = (56, 220), (435, 435), (62, 129), (234, 131), (302, 261)
SOCKETPAIR, IOCTL, PRCTL, FCNTL = (53, 199), (16, 29), (157, 167), (72, 25)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

CLONE_THREAD, AF_UNIX, PR_SET_NAME = 0x10000, 1, 15
TERMINAL_AND_FLAGS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIO(N)CLEX
DUP_AND_FLAGS = (0, 1, 2, 3, 4, 1030)  # F_DUPFD, F_GETFD ... F_SETFL, F_DUPFD_CLOEXEC: nobody else gets a signal
ALLOW, REFUSE, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ARCH, NUMBER, ARGUMENTS = 4, 0, 16  # offsets in struct seccomp_data
PR_SET_SECCOMP, FILTER_MODE, PR_SET_NO_NEW_PRIVS = 22, 2, 38


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def machine() -> str:
    """The architecture, if its system calls are known here.

    Raises:
        OSError: it is not.
    """
    name = platform.machine()
    if name not in AUDIT_ARCH or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError(f"system calls of {name} are not known, only those of {', '.join(AUDIT_ARCH)}")
    return name


def build_filter(pid: int, *, threads: bool) -> bytes:
    """The filter, for the process `pid`. threads: whether it may have any; processes it may not."""
    name = machine()
    column = list(AUDIT_ARCH).index(name)
    lines = [_line(LOAD, ARCH), _line(EQUAL, AUDIT_ARCH[name], 1, 0), _line(RETURN, KILL_PROCESS), _line(LOAD, NUMBER)]
    for entry in ALLOWED.split():
        if (number := entry.split(":")[1 + column]) != "-":
            lines += [_line(EQUAL, int(number), 0, 1), _line(RETURN, ALLOW)]

    def one_of(call: tuple[int, int], argument: int, values: tuple[int, ...], test: int = EQUAL) -> None:
        """Allowed if an argument (its low half: these are ints) passes `test` with one of the values."""
        checks = [_line(test, value, len(values) - place) for place, value in enumerate(values)]
        block = [_line(LOAD, ARGUMENTS + 8 * argument), *checks, _line(RETURN, REFUSE | errno.EPERM)]
        lines.extend([_line(EQUAL, call[column], 0, len(block) + 1), *block, _line(RETURN, ALLOW)])

    if threads:
        one_of(CLONE, 0, (CLONE_THREAD,), ANY_BIT)
    one_of(KILL, 0, (pid,))
    one_of(TGKILL, 0, (pid,))
    one_of(PRLIMIT, 0, (0, pid))
    one_of(SOCKETPAIR, 0, (AF_UNIX,))
    one_of(IOCTL, 1, TERMINAL_AND_FLAGS)
    one_of(PRCTL, 0, (PR_SET_NAME,))
    one_of(FCNTL, 1, DUP_AND_FLAGS)
    # glibc then uses clone, whose flags can be looked at
    lines += [_line(EQUAL, CLONE3[column], 0, 1), _line(RETURN, REFUSE | errno.ENOSYS)]
    return b"".join([*lines, _line(RETURN, REFUSE | errno.EPERM)])


def install(program: bytes) -> None:
    """Put this process under the filter, for good.

    Raises:
        OSError: the kernel does not take it.
    """

    class _Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))

    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    given = _Filter(len(program) // 8, program)
    for arguments in ((PR_SET_NO_NEW_PRIVS, 1, 0), (PR_SET_SECCOMP, FILTER_MODE, ctypes.addressof(given))):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")
