package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit/internal/trial"
)

// accessLog is an access log: bob calls 25 times at once, and alice twice; both once more later.
func accessLog() string {
	var b strings.Builder
	line := func(remote, user, at, request string) {
		fmt.Fprintf(&b, `%s - %s [02/Jan/2026:%s +0100] "%s" 200 17 "-" "agent %s"`+"\n", remote, user, at, request, user)
	}
	for i := range 25 {
		line("10.0.0.2", "bob", "15:00:00", fmt.Sprintf("GET /items?id=%d HTTP/1.1", i))
	}
	line("10.0.0.1", "alice", "15:00:09", "GET /items HTTP/1.1")
	line("10.0.0.1", "alice", "15:00:03", "POST /orders HTTP/1.1") // out of order, as logs are
	b.WriteString("\n")
	line("10.0.0.2", "bob", "15:00:12", "GET /items HTTP/1.1")
	line("10.0.0.1", "-", "15:00:12", "GET /items HTTP/1.1")
	return b.String()
}

func trials(t *testing.T, args ...string) []trialJSON {
	t.Helper()
	return objects[trialJSON](t, execute(t, "", append([]string{"replay", "--json"}, args...)...).ok(t))
}

func TestReplayOfAnAccessLog(t *testing.T) {
	t.Parallel()
	file := writeFile(t, accessLog())
	got := trials(t, file, "--limit", "10 per 1m, capacity 20", "--limit", "fixed window, 100 per 1h")
	if len(got) != 2 {
		t.Fatalf("got %+v", got)
	}
	// bob's 25 at once: 20 are granted; 12 s later 2 tokens are there.
	a, b := got[0], got[1]
	if a.Calls != 29 || a.Granted != 24 || a.Refused != 5 || a.Keys != 2 || a.LongestWait != "6s" || a.LongestWaitKey != "10.0.0.2" || a.Peak != 21 {
		t.Errorf("the bucket: %+v", a)
	}
	if len(a.Most) != 2 || a.Most[0] != (trial.KeyTally{Key: "10.0.0.2", Calls: 26, Refused: 5}) {
		t.Errorf("refused most: %+v", a.Most)
	}
	if b.Granted != 29 || b.Refused != 0 {
		t.Errorf("the window: %+v", b)
	}
	for key, want := range map[string]int{"user": 3, "method": 2, "path": 2, "agent": 3, "remote,method": 3} {
		if got := trials(t, file, "--limit", "10 per 1m", "--key", key); got[0].Keys != want {
			t.Errorf("by %s there are %d keys, want %d", key, got[0].Keys, want)
		}
	}
	if got := trials(t, file, file, "--limit", "10 per 1m, capacity 20", "--reserve"); got[0].Calls != 58 || got[0].Refused != 0 || got[0].LongestWait == "0s" {
		t.Errorf("two files, reserved: %+v", got[0])
	}
	wantIn(t, execute(t, "", "replay", file, "--limit", "10 per 1m").ok(t), "refused most by", "LONGEST WAIT", "10.0.0.2", "57.7 %")
	wantIn(t, execute(t, "", "replay", file, "--limit", "10 per 1m", "--csv").ok(t), "calls,keys,granted")
}

func TestReplayOfCSV(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{
		"RFC 3339":      "time,key,tokens\n2026-01-02T15:00:00Z,a,15\n2026-01-02T15:00:00.5Z,a,15\n2026-01-02T15:00:30Z,b,25\n",
		"PostgreSQL's":  "ts,user,tokens\n2026-01-02 15:00:00+00,a,15\n2026-01-02 15:00:00.5+00,a,15\n2026-01-02 15:00:30+00,b,25\n",
		"seconds":       "timestamp,customer,tokens\n1767366000,a,15\n1767366000.5,a,15\n1767366030,b,25\n",
		"milliseconds":  "at,ip,tokens\r\n1767366000000,a,15\r\n1767366000500,a,15\r\n1767366030000,b,25\r\n",
		"columns apart": "tokens,note,Key,Time\n15,\"x, y\",a,2026-01-02T15:00:00Z\n15,,a,2026-01-02T15:00:00.5Z\n25,,b,2026-01-02T15:00:30Z\n",
	} {
		got := trials(t, writeFile(t, text), "--limit", "10 per 1m, capacity 20", "--count", "tokens")[0]
		// a's second call needs 10 tokens more: 9.917 after half a second has passed.
		if got.Calls != 3 || got.Granted != 1 || got.Tokens != 15 || got.Never != 1 || got.Keys != 2 || got.LongestWait != "59.5s" {
			t.Errorf("%s: got %+v", name, got)
		}
	}
	text := "when,key\n02.01.2026 15:00,a\n"
	if got := trials(t, writeFile(t, text), "--limit", "10 per 1m", "--time", "when", "--time-format", "02.01.2006 15:04"); got[0].Calls != 1 {
		t.Errorf("by a format: %+v", got)
	}
}

// A line that is malformed is named, and nothing is printed or drawn.
func TestMalformedLogs(t *testing.T) {
	t.Parallel()
	good := strings.SplitAfter(accessLog(), "\n")[0]
	for _, test := range []struct {
		name, text string
		line       int
		args       []string
		want       string
	}{
		{"no time", good + good + "10.0.0.1 - - nothing\n", 3, nil, "want a line of an access log"},
		{"bad time", good + strings.Replace(good, "02/Jan", "32/Jan", 1), 2, nil, "want one such as 02/Jan/2026:15:04:05 +0000"},
		{"no request", good + "10.0.0.1 - - [02/Jan/2026:15:04:05 +0000] -\n", 2, []string{"--key", "path"}, "there is no path"},
		{"no agent", `10.0.0.1 - - [02/Jan/2026:15:04:05 +0000] "GET / HTTP/1.1" 200 3` + "\n", 1, []string{"--key", "agent"}, "there is no agent"},
		{"a key that cannot be", good + strings.Replace(good, "10.0.0.2", strings.Repeat("k", 2049), 1), 2, nil, "key of 2049 bytes"},
		{"a key that is no UTF-8", good + strings.Replace(good, "10.0.0.2", "\xff", 1), 2, nil, "valid UTF-8"},
		{"CSV: time", "time,key\n2026-01-02T15:00:00Z,a\nsoon,a\n", 3, nil, `time "soon"`},
		{"CSV: another century", "time,key\n2426-01-02T15:00:00Z,a\n", 2, nil, "1970 to 2284"},
		{"CSV: count", "time,key,n\n2026-01-02T15:00:00Z,a,many\n", 2, []string{"--count", "n"}, `count "many"`},
		{"CSV: negative", "time,key,n\n2026-01-02T15:00:00Z,a,-1\n", 2, []string{"--count", "n"}, `count "-1"`},
		{"CSV: too small a count", "time,key,n\n2026-01-02T15:00:00Z,a,1\n2026-01-02T15:00:00Z,a,1e-300\n", 3, []string{"--count", "n"}, "Count"},
		{"CSV: a field too many", "time,key\n2026-01-02T15:00:00Z,a,b\n", 2, nil, "wrong number of fields"},
		{"CSV: a quote", "time,key\n2026-01-02T15:00:00Z,\"a\nb", 3, nil, `extraneous or missing "`},
		{"CSV: no time", "when,key\n", 1, nil, "no column time"},
		{"CSV: no key", "time,whom\n", 1, nil, "no column key"},
		{"CSV: no such column", "time,key\n", 1, []string{"--key", "whom"}, "no column whom"},
		{"an empty line first", "\ntime,key\n", 1, nil, "its first line is empty"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			file, picture := writeFile(t, test.text), filepath.Join(t.TempDir(), "a.svg")
			o := execute(t, "", append([]string{"replay", file, "--limit", "10 per 1m", "--plot", picture}, test.args...)...)
			o.wantStatus(t, exitBad, fmt.Sprintf("%s:%d: ", file, test.line), test.want)
			if _, err := os.Stat(picture); o.stdout != "" || err == nil {
				t.Errorf("half of it was done: %q, %v", o.stdout, err)
			}
		})
	}
}

func TestBadArgumentsOfTrials(t *testing.T) {
	t.Parallel()
	log, scenario := writeFile(t, accessLog()), writeFile(t, bucket)
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"replay", log}, "no limit to try"},
		{[]string{"replay", log, "--verify", "--limit", "1 per 1s"}, "which --verify is not for"},
		{[]string{"replay", scenario, "--limit", "1 per 1s"}, "which --limit is not for"},
		{[]string{"replay", scenario, log}, "one is a scenario, and the other a log"},
		{[]string{"replay", log, "--limit", "many"}, `"many": want a rate such as`},
		{[]string{"replay", log, "--limit", "0 per 1m"}, "Rate 0"},
		{[]string{"replay", log, "--limit", "10 per never"}, "period"},
		{[]string{"replay", log, "--limit", "10 per 1m, burst 3"}, `"burst 3": want "capacity N"`},
		{[]string{"replay", log, "--limit", "sliding window, 10 per 1m, capacity 3"}, "capacity"},
		{[]string{"replay", log, "--limit", "10 per 1m", "--count", "n"}, "are for CSV"},
		{[]string{"replay", log, "--limit", "10 per 1m", "--key", "cookie"}, `--key "cookie": want one of remote`},
		{[]string{"replay", log, "--limit", "10 per 1m", "--plot", "a.svg", "--plot-key", "nobody"}, "there is no call of it"},
		{[]string{"replay", log, "--limit", "10 per 1m", "--theme", "pink"}, `--theme "pink"`},
		{[]string{"replay", log, "--limit", "10 per 1m", "--most", "-1"}, "--most -1"},
		{[]string{"replay", log, "--definitions", writeFile(t, bucket+`{"override": {"name": "l", "key": "k", "rate": 3}}`)}, ":2: only definitions"},
		{[]string{"simulate"}, "nobody comes"},
		{[]string{"simulate", "--rate", "1"}, "no limit to try"},
		{[]string{"simulate", "--rate", "-1", "--limit", "1 per 1s"}, "--rate -1"},
		{[]string{"simulate", "--rate", "1", "--keys", "0", "--limit", "1 per 1s"}, "--keys 0"},
		{[]string{"simulate", "--rate", "1", "--retry", "maybe", "--limit", "1 per 1s"}, `--retry "maybe"`},
		{[]string{"simulate", "--rate", "1", "--retry", "fixed", "--spread", "0s", "--limit", "1 per 1s"}, "--spread 0s"},
		{[]string{"simulate", "--rate", "1e9", "--for", "24h", "--limit", "1 per 1s"}, "must be at most 5000000"},
		{[]string{"simulate", "--rate", "1", "--capacities", "1", "--limit", "sliding window, 5 per 1s"}, "it is its rate"},
		{[]string{"simulate", "--rate", "1", "--capacities", "-1", "--limit", "5 per 1s"}, "Capacity -1"},
		{[]string{"simulate", "--rate", "1", "--count", "1e-300", "--limit", "5 per 1s"}, "Count"},
	} {
		t.Run(strings.Join(test.args, " "), func(t *testing.T) {
			t.Parallel()
			o := execute(t, "", test.args...)
			o.wantStatus(t, exitBad, test.want)
			if o.stdout != "" {
				t.Errorf("standard output: %q", o.stdout)
			}
		})
	}
}

func TestSimulate(t *testing.T) {
	t.Parallel()
	run := func(args ...string) []outcomeJSON {
		t.Helper()
		return objects[outcomeJSON](t, execute(t, "", append([]string{"simulate", "--json"}, args...)...).ok(t))
	}
	edge := run("--limit", "fixed window, 100 per 1m", "--limit", "sliding window, 100 per 1m", "--burst", "100", "--every", "59s", "--for", "5m")
	if len(edge) != 2 || edge[0].Peak != 200 || edge[1].Peak != 100 || edge[0].Callers != 600 {
		t.Errorf("at a window's edge: %+v", edge)
	}
	bought := run("--limit", "60 per 1m", "--capacities", "10,1", "--rate", "0.9", "--for", "1h")
	if len(bought) != 2 || bought[0].Limit.Capacity != 1 || bought[0].RefusedShare <= bought[1].RefusedShare {
		t.Errorf("what capacity buys: %+v", bought)
	}
	args := []string{"--limit", "10 per 1m", "--herd", "100", "--retry", "jitter", "--attempts", "50"}
	if a, b, c := run(args...)[0], run(args...)[0], run(append(args, "--seed", "2")...)[0]; a.Calls != b.Calls || a.WaitMax != b.WaitMax || a.WaitMax == c.WaitMax {
		t.Errorf("the same seed and another: %+v, %+v, %+v", a, b, c)
	}
	picture := filepath.Join(t.TempDir(), "a.svg")
	wantIn(t, execute(t, "", "simulate", "--limit", "10 per 1m, capacity 20", "--rate", "0.3", "--pause", "1m", "--plot", picture, "--theme", "dark").ok(t), "MOST IN A PERIOD")
	text, err := os.ReadFile(picture)
	must(t, err)
	wantIn(t, string(text), "<svg", "paused", "#0d1117")
}

// Limits as --limit takes them.
func TestLimitTexts(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"10 per 1m": `token bucket "limit": 10 per 1m, capacity 10, max reserved unlimited`,
		"token bucket, 0.5 a second, capacity 2, max reserved 3": `token bucket "limit": 0.5 per 1s, capacity 2, max reserved 3`,
		"fixed window, 100 per hour, 4 shards":                   `fixed window "limit": 100 per 1h, capacity 100, max reserved unlimited, 4 shards`,
		"sliding window, 100 per 90s, 30 slots":                  `sliding window "limit": 100 per 1m30s, max reserved unlimited, 30 slots`,
		"1000 per month in Europe/Berlin, max reserved none":     `fixed window "limit": 1000 per month in "Europe/Berlin" from 2024-01-01, capacity 1000, max reserved none`,
	} {
		limit, err := parseLimit(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
		} else if got := limit.Definition().String(); got != want {
			t.Errorf("%s: got %s, want %s", text, got, want)
		}
	}
}

var benchTime = time.Date(2026, 3, 2, 8, 0, 0, 0, time.UTC)

// A million lines of an access log, or with -short enough to see that it runs: the whole program.
func BenchmarkReplayOfAMillion(b *testing.B) {
	file := filepath.Join(b.TempDir(), "access.log")
	f, err := os.Create(file)
	must(b, err)
	lines := 1_000_000
	if testing.Short() {
		lines = 20_000
	}
	for i := range lines {
		at := benchTime.Add(time.Duration(i) * 17 * time.Millisecond)
		fmt.Fprintf(f, "10.0.%d.%d - - [%s] \"GET /api/v1/items?id=%d HTTP/1.1\" 200 1234 \"-\" \"curl/8\"\n", i%7, i*i%211, at.Format("02/Jan/2006:15:04:05 -0700"), i)
	}
	must(b, f.Close())
	for b.Loop() {
		var out strings.Builder
		if status := run(b.Context(), []string{"replay", file, "--limit", "10 per 1m, capacity 20"}, strings.NewReader(""), &out, &out); status != exitOK {
			b.Fatalf("exit status %d: %s", status, out.String())
		}
	}
}
