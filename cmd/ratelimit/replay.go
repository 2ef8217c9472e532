package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/scenario"
)

const replayLong = `Replay what was, on a clock of its own, and say what limits would have answered. What
begins with a JSON object is a scenario; all else is a log. - is standard input. All
files are read before the first call, and nothing is replayed if one is malformed.

A log is an access log in the common or the combined format, or CSV with a line that names
the columns. Its calls are put to each limit in memory, in the order of their times, and
it is printed how many were granted and refused, the longest wait that one was told, the
most that a key got within a period, and who was refused most.

A scenario is replayed on an empty store, and the answer to each call is printed, one
JSON object a line.

A scenario has one JSON object a line, a definition or a call; empty lines and
lines that begin with # are passed over. Times are offsets from one instant.

  {"limit": {"name": "l", "kind": "token bucket", "rate": 10, "period": "60s"}}
  {"at": "0s", "do": "allow", "limit": "l", "key": "u1", "count": 7}
  {"at": "6s", "do": "reserve", "limit": "l", "key": "u1", "count": 5,
   "want": {"ok": true, "retryAfter": "6s", "value": -1}}      (on one line)

A definition has also capacity and maxReserved (a number or "none"; maxReserved
also "unlimited"), shards and, if its kind is "fixed window", start. A quota by
the calendar is a fixed window with "every": "month" or "3 months" in place of
period and start, a "zone", an "anchor" and a "time": "09:00"; {"base": "2026-01-31T10:00:00Z"}, before all
other lines, says from which instant the scenario counts. Calls do
allow, reserve, check (with "reserve": true: what reserve would say), at most (as
many whole tokens as there are, up to the count), settle (with "of": what that
call, counted from 0, took was really the count; no limit), reset, credit, pause
(with "until"), resume or change (with "to": the definition that replaces the
limit's for the key, with what was used kept; later calls need the definition on a
line of its own). Allow, check and at most have "above" if a share of the
capacity is to be left, such as 0.2. Several limits in one call are written
"all": [{"limit": "a", "count": 5}, {"limit": "b"}]. A want of
{"error": "never"} is for a call that can never succeed, {"error": "invalid"}
for one that makes no sense, such as a negative count.`

// replayFlags are the arguments of replay.
type replayFlags struct {
	store    string
	portable bool
	verify   bool
	files    []string
}

func replayCommand(o *options) *cobra.Command {
	var f replayFlags
	var log logFlags
	c := &cobra.Command{
		Use:   "replay FILE...",
		Short: "Replay an access log or CSV against limits, or scenarios",
		Long:  replayLong,
		Example: `  ratelimit replay access.log --limit '10 per 1m' --limit '100 per 1m, capacity 200'
  ratelimit replay calls.csv --definitions limits.jsonl --key tenant,user --count tokens --plot calls.svg
  ratelimit replay --store postgres --verify scenarios/*.jsonl`,
		GroupID: trying,
		RunE: func(cmd *cobra.Command, args []string) error {
			f.files = args
			const see = " (see \"ratelimit replay --help\")"
			switch {
			case f.store != "memory" && f.store != "postgres":
				return bad("--store %q: want memory or postgres"+see, f.store)
			case f.portable && f.store != "postgres":
				return bad("--portable is for --store postgres only" + see)
			case len(f.files) == 0:
				return bad("no file to replay" + see)
			}
			stdin := bufio.NewReader(cmd.InOrStdin())
			scenarios, err := sniff(stdin, args)
			if err != nil {
				return err
			}
			of, others := "a scenario", logNames
			if !scenarios {
				of, others = "a log", []string{"store", "portable", "verify"}
			}
			for _, name := range others {
				if cmd.Flags().Changed(name) {
					return bad("%s is %s, which --%s is not for", args[0], of, name)
				}
			}
			if scenarios {
				return replay(cmd, stdin, f)
			}
			return replayLogs(cmd, o.printer(cmd), stdin, args, &log)
		},
	}
	c.Flags().StringVar(&f.store, "store", "memory", `scenario: where the limits are kept: "memory", or "postgres" for PostgreSQL, in a schema that is dropped at the end: in the database that DATABASE_URL names, or else on a server that is started for it`)
	c.Flags().BoolVar(&f.portable, "portable", false, "scenario: on postgres, the statements for Citus, on a table that is not distributed")
	c.Flags().BoolVar(&f.verify, "verify", false, `scenario: compare each answer with the call's "want", stop at the first that differs with exit status 1, and say on standard error how many agreed; the answers are printed all the same`)
	log.addTo(c)
	return o.listing(c)
}

func replay(cmd *cobra.Command, stdin io.Reader, flags replayFlags) error {
	scenarios, err := readScenarios(stdin, flags.files)
	if err != nil {
		return err
	}

	// Only now, when nothing waits for standard input any more: a replay
	// that is stopped must not leave its schema behind. The second signal ends the
	// program at once. A pipe that was closed is no signal then, but an error of
	// the writing.
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	context.AfterFunc(ctx, stop)
	signal.Ignore(syscall.SIGPIPE)
	defer signal.Reset(syscall.SIGPIPE)

	agreed, name := 0, "memory"
	run := func(stores newStore) (err error) {
		agreed, err = replayAll(ctx, stores, scenarios, cmd.OutOrStdout(), flags.verify)
		return err
	}
	if flags.store == "postgres" {
		name, err = onPostgres(ctx, flags.portable, run)
	} else {
		err = run(inMemory)
	}
	if err == nil && flags.verify {
		fmt.Fprintf(cmd.ErrOrStderr(), "%s in %s agreed, on %s\n", plural(agreed, "call"), plural(len(scenarios), "file"), name)
	}
	return err
}

func readScenarios(stdin io.Reader, files []string) ([]scenario.Scenario, error) {
	scenarios := make([]scenario.Scenario, len(files))
	for i, file := range files {
		if file == "-" && slices.Contains(files[:i], "-") {
			return nil, bad("standard input can be replayed once only")
		}
		name, text, err := readFile(stdin, file)
		if err != nil {
			return nil, badInput{err}
		}
		if scenarios[i], err = scenario.Parse(name, text); err != nil {
			return nil, badInput{err}
		}
	}
	return scenarios, nil
}

func readFile(stdin io.Reader, file string) (name string, text []byte, err error) {
	if file != "-" {
		text, err = os.ReadFile(file) // names the file in its error
		return file, text, err
	}
	if text, err = io.ReadAll(stdin); err != nil {
		err = fmt.Errorf("read standard input: %w", err)
	}
	return "<stdin>", text, err
}

// replayAll replays each scenario on an empty store, prints the answers and,
// when verify is set, returns how many were as wanted.
func replayAll(ctx context.Context, stores newStore, scenarios []scenario.Scenario, out io.Writer, verify bool) (agreed int, err error) {
	buffered := bufio.NewWriter(out)
	answers := json.NewEncoder(buffered)
	answers.SetEscapeHTML(false)
	var now time.Time
	for _, s := range scenarios {
		err = stores(ctx, func() time.Time { return now }, func(store ratelimit.Store) error {
			var taken scenario.Receipts
			for _, c := range s.Calls {
				now = c.At
				got, err := c.Ask(ctx, store, &taken)
				if err != nil {
					return fmt.Errorf("%s:%d: %s: %w", s.Name, c.Line, c.Do, err)
				}
				if err := answers.Encode(got); err != nil {
					return fmt.Errorf("print the answer: %w", err)
				}
				if !verify || c.Want == nil {
					continue
				}
				if field := c.Want.Differs(got); field != "" {
					return fmt.Errorf("%s:%d: %s differs\n\twant %s\n\tgot  %s", s.Name, c.Line, field, compact(c.Want), compact(got))
				}
				agreed++
			}
			return nil
		})
		if err != nil {
			break
		}
	}
	return agreed, cmp.Or(err, buffered.Flush())
}

// compact is v as JSON. Answers and wants hold nothing that JSON has no words for.
func compact(v any) string {
	text, _ := json.Marshal(v)
	return string(text)
}
