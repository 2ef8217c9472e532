// Command ratelimit tries limits out, shows them as they are in a database, and looks after
// them there. See "ratelimit help".
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit/internal/visible"
)

// Exit statuses, the same for every command.
const (
	exitOK     = 0
	exitFailed = 1 // an answer other than the one wanted, or a failure at run time
	exitBad    = 2 // bad arguments, or a malformed file
)

// badInput is a fault of the command's input, be it an argument or a
// file, and not of the machine.
type badInput struct{ error }

func (e badInput) Unwrap() error { return e.error }

// bad makes a badInput of a message.
func bad(format string, args ...any) error { return badInput{fmt.Errorf(format, args...)} }

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole program; it returns the exit status.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root, started := newRoot()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	named, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	if !*started { // cobra did not like the arguments
		hint := ""
		if strings.HasPrefix(err.Error(), "unknown shorthand flag") { // such as -3
			hint = "what is no flag comes after --, "
		}
		err = bad("%w (%ssee \"%s --help\")", err, hint, named.CommandPath())
	}
	fmt.Fprintln(stderr, "ratelimit:", visible.Lines(strings.TrimPrefix(err.Error(), "ratelimit: ")))
	if _, bad := errors.AsType[badInput](err); bad {
		return exitBad
	}
	return exitFailed
}

// newRoot makes the program. It reports in started whether the arguments were in order, so that
// a command began.
func newRoot() (root *cobra.Command, started *bool) {
	o := &options{}
	root = &cobra.Command{
		Use:   "ratelimit COMMAND",
		Short: "Try rate limits out, see them, and operate them",
		Long: `Try rate limits out, see them in a database, and operate them there.

A key is printed as it is, or in double quotes with escapes if something in it is hidden;
it can be given either way.

Exit status: 0; 1 for an answer other than the one wanted, or a failure at run time;
2 for bad arguments or a malformed file, of which nothing was done.`,
		Version:       version(),
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(*cobra.Command, []string) error {
			return bad("no command (see \"ratelimit --help\")")
		},
	}
	root.SetVersionTemplate("{{.Version}}\n")
	o.addTo(root)
	root.AddGroup(&cobra.Group{ID: seeing, Title: "See:"}, &cobra.Group{ID: operating, Title: "Operate:"}, &cobra.Group{ID: trying, Title: "Try out:"})
	root.AddCommand(commands(o)...)
	started = new(bool)
	guard(root, o, started)
	return root, started
}

// The groups of commands in the help.
const (
	seeing    = "see"
	operating = "operate"
	trying    = "try"
)

// commands are the verbs of the program.
func commands(o *options) []*cobra.Command {
	return []*cobra.Command{
		lsCommand(o), showCommand(o), topCommand(o), serveCommand(o),
		resetCommand(o), creditCommand(o), pauseCommand(o), resumeCommand(o), pruneCommand(o), changeCommand(o), forgetCommand(o), eraseCommand(o),
		inflightCommand(o), catalogCommand(o), keyCommand(o), doctorCommand(o), migrateCommand(o),
		replayCommand(o), simulateCommand(o), manCommand(), versionCommand(),
	}
}

// guard notes when a command of the tree begins.
func guard(c *cobra.Command, o *options, started *bool) {
	if do := c.RunE; do != nil {
		c.RunE = func(cmd *cobra.Command, args []string) error {
			*started = true
			if o.json && o.csv {
				return bad("--json or --csv, and not both")
			}
			return do(cmd, args)
		}
	}
	for _, child := range c.Commands() {
		guard(child, o, started)
	}
}

func versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), version())
			return err
		},
	}
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
