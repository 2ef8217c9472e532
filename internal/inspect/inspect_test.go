package inspect

import (
	"encoding/json"
	"slices"
	"testing"
	"time"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/internal/visible"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}

func TestSpan(t *testing.T) {
	t.Parallel()
	for d, want := range map[time.Duration]string{
		0:                                   "0 s",
		time.Microsecond:                    "1 ms",
		350 * time.Millisecond:              "350 ms",
		999*time.Millisecond + 1:            "1 s",
		2500 * time.Millisecond:             "2.5 s",
		2501 * time.Millisecond:             "2.6 s",
		9950 * time.Millisecond:             "10 s",
		17973 * time.Millisecond:            "18 s",
		59*time.Second + 1:                  "1 min",
		90 * time.Second:                    "1 min 30 s",
		time.Hour:                           "1 h",
		59*time.Minute + 59*time.Second + 1: "1 h",
		3*time.Hour + 4*time.Minute + time.Second:               "3 h 5 min",
		24*time.Hour - time.Second:                              "1 d",
		107*time.Hour + 28*time.Minute + 25803*time.Millisecond: "4 d 12 h",
		107 * time.Hour: "4 d 11 h",
		48 * time.Hour:  "2 d",
	} {
		if got := Span(d); got != want {
			t.Errorf("%v: got %q, want %q", d, got, want)
		}
	}
	for d, want := range map[time.Duration]string{time.Hour: "1h", 90 * time.Minute: "1h30m", time.Hour + time.Second: "1h0m1s", 48 * time.Hour: "48h", 10 * time.Minute: "10m"} {
		if got := visible.Period(d); got != want {
			t.Errorf("%v: got %q, want %q", d, got, want)
		}
	}
}

// A page of the keys of permits reads the keys of its prefix, and no key behind it but the next.
func TestKeysOfPermitsEndWithTheirPrefix(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	d := &Inspector{Pool: db.Pool, Schema: db.Schema}
	_, err := db.Pool.Exec(t.Context(), `INSERT INTO `+d.Table()+` SELECT 'exports', 'us/' || i, 0, 1, now() FROM generate_series(1, 5000) AS i;
INSERT INTO `+d.Table()+` SELECT 'exports', 'eu/' || i, s, 1, now() FROM generate_series(1, 3) AS i, generate_series(0, 9) AS s; ANALYZE `+d.Table())
	must(t, err)
	for _, test := range []struct {
		page ratelimit.Page
		want []string
		rows float64
	}{
		{ratelimit.Page{Prefix: "eu/", Most: 50}, []string{"eu/1", "eu/2", "eu/3"}, 4},
		{ratelimit.Page{Prefix: "eu/", After: "eu/2", Most: 50}, []string{"eu/3"}, 2},
		{ratelimit.Page{Prefix: "ev", Most: 50}, nil, 1},
		{ratelimit.Page{Prefix: "zz", Most: 50}, nil, 0},
	} {
		keys, err := d.PermitKeys(t.Context(), "exports", test.page)
		if err != nil || !slices.Equal(keys, test.want) {
			t.Errorf("%v: got %q, %v, want %q", test.page, keys, err, test.want)
		}
		var plan []byte
		err = db.Pool.QueryRow(t.Context(), "EXPLAIN (ANALYZE, FORMAT JSON) "+d.permitKeys(), "exports", test.page.Prefix, test.page.After, int64(test.page.Most)).Scan(&plan)
		must(t, err)
		var plans []struct{ Plan node }
		must(t, json.Unmarshal(plan, &plans))
		if read := plans[0].Plan.read(); read > test.rows || read < float64(len(test.want)) {
			t.Errorf("%v: %g rows were read, want at most %g:\n%s", test.page, read, test.rows, plan)
		}
	}
}

// node is a node of a plan.
type node struct {
	Relation string  `json:"Relation Name"`
	Rows     float64 `json:"Actual Rows"`
	Loops    float64 `json:"Actual Loops"`
	Plans    []node
}

// read returns how many rows of tables were read.
func (n *node) read() (rows float64) {
	if n.Relation != "" {
		rows = n.Rows * n.Loops
	}
	for i := range n.Plans {
		rows += n.Plans[i].read()
	}
	return rows
}
