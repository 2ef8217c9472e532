package throwaway

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The versions of PostgreSQL that the library supports.
const (
	minMajor = 14
	maxMajor = 18
)

const (
	localTimeout = time.Minute           // for initdb and the start; about a second is usual
	pollInterval = 10 * time.Millisecond // between attempts to connect to a starting server
	portAttempts = 5
)

// errPortTaken means that another process was faster to take the chosen port.
var errPortTaken = errors.New("the port was taken meanwhile")

//go:embed directory.sh
var directory string

//go:embed supervisor.sh
var supervisor string

// binGlobs are where packages put server binaries that are not in the PATH.
var binGlobs = []string{
	"/usr/lib/postgresql/*/bin",          // Debian, Ubuntu
	"/usr/pgsql-*/bin",                   // the PostgreSQL project's own RPMs
	"/usr/libexec/postgresql*",           // Alpine
	"/opt/homebrew/opt/postgresql@*/bin", // Homebrew on Apple silicon
	"/usr/local/opt/postgresql@*/bin",    // Homebrew on Intel
	"/usr/local/pgsql/bin",               // built from source
	"/Applications/Postgres.app/Contents/Versions/*/bin",
}

// binDirs lists the directories of this machine that may hold server binaries.
func binDirs(ctx context.Context) []string {
	if dir := os.Getenv(BinVariable); dir != "" {
		return []string{dir}
	}
	dirs := slices.DeleteFunc(filepath.SplitList(os.Getenv("PATH")), isRelative)
	if out, err := exec.CommandContext(ctx, "pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	for _, glob := range binGlobs {
		found, _ := filepath.Glob(glob) // fails for malformed patterns only
		dirs = append(dirs, found...)
	}
	return dirs
}

// isRelative reports whether a path depends on the current directory.
func isRelative(path string) bool { return !filepath.IsAbs(path) }

// local starts a server from the newest supported binaries in dirs.
func local(ctx context.Context, dirs []string, opts Options) (*Server, error) {
	inst, err := newest(ctx, dirs)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()
	for range portAttempts {
		s, err := inst.start(ctx, opts)
		if err == nil {
			return s, nil
		}
		if !errors.Is(err, errPortTaken) {
			return nil, fmt.Errorf("%s does not start: %w", inst, err)
		}
	}
	return nil, fmt.Errorf("%s does not start: %w, %d times", inst, errPortTaken, portAttempts)
}

// installation is a directory with the binaries of one version of PostgreSQL.
type installation struct {
	dir          string
	version      string // such as 17.5 or 18beta1
	major, minor int
}

func (i installation) String() string {
	return fmt.Sprintf("PostgreSQL %s from %s", i.version, i.dir)
}

func (i installation) supported() bool {
	return minMajor <= i.major && i.major <= maxMajor
}

func (i installation) newerThan(j installation) bool {
	return i.major > j.major || i.major == j.major && i.minor > j.minor
}

// newest picks the newest supported installation. The error names those that
// were passed over.
func newest(ctx context.Context, dirs []string) (installation, error) {
	var best installation
	var passed []string
	for _, dir := range slices.Compact(slices.Sorted(slices.Values(dirs))) {
		inst, err := inspect(ctx, dir)
		switch {
		case errors.Is(err, os.ErrNotExist):
		case err != nil:
			passed = append(passed, err.Error())
		case !inst.supported():
			passed = append(passed, inst.String())
		case inst.newerThan(best):
			best = inst
		}
	}
	if best.dir != "" {
		return best, nil
	}
	if len(passed) > 0 {
		return best, fmt.Errorf("passed over: %s", strings.Join(passed, "; "))
	}
	return best, errors.New("found none in the PATH nor in the usual directories")
}

// inspect asks the binaries in dir for their version. The error is
// os.ErrNotExist if there are none.
func inspect(ctx context.Context, dir string) (installation, error) {
	for _, name := range []string{"initdb", "postgres"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return installation{}, os.ErrNotExist
		}
	}
	path := filepath.Join(dir, "postgres")
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return installation{}, fmt.Errorf("%s --version: %w", path, err)
	}
	inst := installation{dir: dir}
	// Such as "postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)".
	if _, err := fmt.Sscanf(string(out), "postgres (PostgreSQL) %s", &inst.version); err != nil {
		return installation{}, fmt.Errorf("%s --version: unexpected %q", path, out)
	}
	// A pre-release such as 18beta1 has no minor version, which leaves 0.
	_, _ = fmt.Sscanf(inst.version, "%d.%d", &inst.major, &inst.minor)
	return inst, nil
}

// start starts a server on a free port. It fails with errPortTaken if the port
// is not free any more by the time the server wants it.
func (i installation) start(ctx context.Context, opts Options) (*Server, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	return i.startOn(ctx, port, opts)
}

func (i installation) startOn(ctx context.Context, port string, opts Options) (*Server, error) {
	if opts.StandbyOf != "" {
		if _, err := exec.LookPath(filepath.Join(i.dir, "pg_basebackup")); err != nil {
			return nil, fmt.Errorf("%w: %w", exec.ErrNotFound, err)
		}
		primary, password, err := splitURL(opts.StandbyOf)
		if err != nil {
			return nil, err
		}
		return i.supervise(ctx, port, opts, data{primary: primary, password: password})
	}
	archive, password, err := i.template(ctx)
	if err != nil {
		return nil, err
	}
	defer archive.Close()
	return i.supervise(ctx, port, opts, data{archive: []*os.File{archive}, password: password})
}

// data is the source of a new server's data: one archive, or a primary.
type data struct {
	archive  []*os.File
	primary  string
	password string
}

// supervise starts the supervisor, which starts the server.
func (i installation) supervise(ctx context.Context, port string, opts Options, from data) (*Server, error) {
	again := "0"
	if opts.Restart {
		again = "1"
	}
	parent := FastDir()
	if opts.Fsync {
		parent = os.TempDir()
	}
	cmd := shell(supervisor, parent, append([]string{i.dir, again, from.primary}, serverArgs(port, opts)...))
	cmd.ExtraFiles = from.archive
	if err := dropRoot(cmd); err != nil {
		return nil, err
	}
	p, err := startProcess(cmd)
	if err != nil {
		return nil, err
	}
	// If this fails, so does the supervisor, which knows better why.
	_, _ = fmt.Fprintln(p.stdin, from.password)

	s := &Server{URL: loopbackURL(port, from.password), Source: i.String(), process: p, Here: true}
	return s.ready(ctx)
}

// shell returns the command that runs a script in a directory of its own, within parent.
func shell(script, parent string, args []string) *exec.Cmd {
	cmd := exec.Command("/bin/sh", append([]string{"-c", directory + script, "throwaway"}, args...)...)
	cmd.Dir = "/" // the current directory may be closed to the server's user
	cmd.Env = append(serverEnv(), "TMPDIR="+parent)
	return cmd
}

// splitURL takes the password out of a URL, which all users of the machine could read among
// the arguments of a program.
func splitURL(text string) (without, password string, err error) {
	u, err := url.Parse(text)
	if err != nil {
		return "", "", err
	}
	password, _ = u.User.Password()
	u.User = url.User(u.User.Username())
	return u.String(), password, nil
}

// startError says why the supervisor ended although nobody told it to.
func startError(p *process) error {
	if strings.Contains(p.stderr.String(), "could not create any TCP/IP sockets") {
		return errPortTaken
	}
	if p.err == nil {
		return errors.New("it ended at once, without an error")
	}
	return p.err
}

func serverArgs(port string, opts Options) []string {
	args := []string{
		// Errors of statements are the client's to report, and no news.
		"-c", "log_min_messages=log",
	}
	args = append(args, settingArgs(opts)...)
	// These come last, and so win, since the URL depends on them.
	return append(
		args,
		"-c", "listen_addresses=127.0.0.1",
		"-c", "port="+port,
		"-c", "unix_socket_directories=",
	)
}

// serverEnv leaves out the environment variables that PostgreSQL would heed.
func serverEnv() []string {
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "PG") || strings.HasPrefix(v, "LC_") || strings.HasPrefix(v, "LANG")
	})
	return append(env, "LC_ALL=C")
}

// FastDir returns the directory for data that need not outlive the machine: in memory where
// there is room, unless TMPDIR names another.
func FastDir() string {
	if os.Getenv("TMPDIR") == "" {
		if dir := memoryDir(); dir != "" {
			return dir
		}
	}
	return os.TempDir()
}

// freePort returns a port that was free a moment ago.
func freePort() (string, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return "", fmt.Errorf("choosing a port: %w", err)
	}
	defer l.Close()
	return strconv.Itoa(l.Addr().(*net.TCPAddr).Port), nil
}

func loopbackURL(port, password string) string {
	u := url.URL{
		Scheme:   "postgres",
		User:     url.UserPassword("postgres", password),
		Host:     net.JoinHostPort("127.0.0.1", port),
		Path:     "/postgres",
		RawQuery: "sslmode=disable",
	}
	return u.String()
}
