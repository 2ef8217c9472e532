// Command ratelimit tries limits out and looks after them in a database. See
// "ratelimit help".
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"text/tabwriter"
)

// Exit statuses, the same for every command.
const (
	exitOK     = 0
	exitFailed = 1 // an answer other than the one wanted, or a failure at run time
	exitBad    = 2 // bad arguments, or a malformed file
)

// A command is one verb of the program. To add a verb, add it to commands.
type command struct {
	name    string
	summary string // a line in the list of commands
	help    string // what -h prints: usage, flags and an example
	run     func(ctx context.Context, std streams, args []string) error
}

var commands = []command{
	{"replay", "replay scenarios on a clock of their own, and say what each call would answer", replayHelp, replay},
	{"migrate", "put the schema in place, take it back, or print it", migrateHelp, runMigrate},
}

// streams are what a command reads and writes.
type streams struct {
	in       io.Reader
	out, err io.Writer
}

// badInput is a fault of what the command was given, be it an argument or a
// file, and not of the machine.
type badInput struct{ error }

func (e badInput) Unwrap() error { return e.error }

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole program; it returns the exit status.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	err := dispatch(ctx, streams{stdin, stdout, stderr}, args)
	if err == nil {
		return exitOK
	}
	fmt.Fprintln(stderr, "ratelimit:", err)
	if _, bad := errors.AsType[badInput](err); bad {
		return exitBad
	}
	return exitFailed
}

func dispatch(ctx context.Context, std streams, args []string) error {
	if len(args) == 0 {
		return badInput{fmt.Errorf("no command\n\n%s", usage())}
	}
	switch args[0] {
	case "help", "-h", "-help", "--help":
		return help(std.out, args[1:])
	case "version", "-version", "--version":
		_, err := fmt.Fprintln(std.out, version())
		return err
	}
	cmd, err := find(args[0])
	if err != nil {
		return err
	}
	err = cmd.run(ctx, std, args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return help(std.out, args[:1])
	}
	return err
}

// version returns the version of the program, of the Go that built it, and of the
// system that it was built for.
func version() string {
	version := "(devel)"
	if info, ok := debug.ReadBuildInfo(); ok && info.Main.Version != "" {
		version = info.Main.Version
	}
	return fmt.Sprintf("ratelimit %s %s %s/%s", version, runtime.Version(), runtime.GOOS, runtime.GOARCH)
}

func find(name string) (command, error) {
	i := slices.IndexFunc(commands, func(c command) bool { return c.name == name })
	if i < 0 {
		return command{}, badInput{fmt.Errorf("unknown command %q\n\n%s", name, usage())}
	}
	return commands[i], nil
}

// help prints the help of the command that is named, or else of the program.
func help(w io.Writer, names []string) error {
	text := usage()
	if len(names) > 0 {
		cmd, err := find(names[0])
		if err != nil {
			return err
		}
		text = cmd.help
	}
	_, err := io.WriteString(w, text)
	return err
}

func usage() string {
	var b strings.Builder
	b.WriteString("usage: ratelimit COMMAND [ARGUMENT...]\n\n")
	table := tabwriter.NewWriter(&b, 0, 0, 3, ' ', 0)
	for _, c := range commands {
		fmt.Fprintf(table, "  %s\t%s\n", c.name, c.summary)
	}
	fmt.Fprint(table, "  version\tprint the version\n")
	fmt.Fprint(table, "  help [COMMAND]\tsay more about a command, as -h after it does\n")
	table.Flush() // a strings.Builder takes all that it is given
	b.WriteString(`
Exit status: 0; 1 for an answer other than the one wanted, or a failure at run
time; 2 for bad arguments or a malformed file.
`)
	return b.String()
}

// newFlags is a command's empty set of flags. It reports faults to its caller
// and prints nothing.
func newFlags(name string) *flag.FlagSet {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	return flags
}

// parse takes the flags out of args, wherever they are, and returns the rest.
func parse(flags *flag.FlagSet, args []string) (operands []string, err error) {
	for {
		if err := flags.Parse(args); err != nil {
			return nil, badUsage(flags.Name(), err)
		}
		if flags.NArg() == 0 {
			return operands, nil
		}
		operands = append(operands, flags.Arg(0))
		args = flags.Args()[1:]
	}
}

// badUsage is err, from the arguments of the named command, with a way on.
func badUsage(name string, err error) error {
	return badInput{fmt.Errorf("%s: %w (see \"ratelimit %[1]s -h\")", name, err)}
}
