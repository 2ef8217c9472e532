package main

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/bucket"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// account is the results of all processes, and the contents of the database.
type account struct {
	mu     sync.Mutex
	counts map[string]map[string]int // by verb and result
	faults map[string]int            // other errors, by their text
	byID   map[int64]string          // of transactions: the result
	moves  map[[2]string]*move       // of decisions on their own, and of none
	rolled map[string]int            // other results of transactions that were rolled back
	unlike []string                  // what callers were told, and Config.Observe otherwise
	memory int                       // decisions from memory
	begun  time.Time
}

func newAccount() *account {
	return &account{counts: map[string]map[string]int{}, faults: map[string]int{}, rolled: map[string]int{}, byID: map[int64]string{}, moves: map[[2]string]*move{}, begun: time.Now()}
}

// note enters what a caller was told.
func (a *account) note(t told) {
	if a.counts[t.Verb] == nil {
		a.counts[t.Verb] = map[string]int{}
	}
	a.counts[t.Verb][t.What]++
	if t.Unlike != "" {
		a.unlike = append(a.unlike, t.Unlike)
	}
	if t.Memory {
		a.memory++
	}
	if t.Err != "" && (t.What == "error" || t.What == "unknown") {
		a.faults[t.Verb+": "+t.Err]++
	}
	if t.What == "rolled back" {
		a.rolled[t.Err]++
	}
	if t.ID != 0 {
		a.byID[t.ID] = t.What
	}
	a.add(t.Moves)
}

func (a *account) add(moves []move) {
	for _, m := range moves {
		sum := a.of(m.Limit, m.Key)
		sum.Low += m.Low
		sum.High += m.High
	}
}

func (a *account) of(limit, key string) *move {
	id := [2]string{limit, key}
	if a.moves[id] == nil {
		a.moves[id] = &move{Limit: limit, Key: key}
	}
	return a.moves[id]
}

// count counts the results that are wanted.
func (a *account) count(wanted func(verb, what string) bool) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for verb, counts := range a.counts {
		for what, count := range counts {
			if wanted(verb, what) {
				n += count
			}
		}
	}
	return n
}

// total counts the results of verbs with a prefix.
func (a *account) total(prefix, what string) int {
	return a.count(func(verb, w string) bool { return w == what && strings.HasPrefix(verb, prefix) })
}

// coded counts the results with an SQLSTATE.
func (a *account) coded(code string) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, texts := range []map[string]int{a.faults, a.rolled} {
		for text, count := range texts {
			if strings.Contains(text, "SQLSTATE "+code) {
				n += count
			}
		}
	}
	return n
}

// granted counts the results that are OK.
func (a *account) granted() int { return a.total("", "ok") }

// owed is the debt that a limit begins with: a pause takes the tokens left, but no debt.
const owed = -1000

// seed fills the rows of the limits half, so that giving back never meets a full one.
// Those of sliding windows have no slots, as after another kind of limit, until a call
// makes some.
func (l *site) seed(ctx context.Context, schema string) error {
	conn, err := pgx.Connect(ctx, l.server.URL)
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var b pgx.Batch
	for _, limit := range seeded {
		d := bucket.Definition(limit.Definition())
		for key := range keys {
			ts := d.Fresh(fmt.Sprint(key), time.Now()).TS
			for shard := range d.Shards {
				b.Queue("INSERT INTO "+schema+".rate_limits (name, key, shard, value, ts) VALUES ($1::text, $2::text, $3::int4, $4::float8, $5::timestamptz)",
					d.Name, fmt.Sprint(key), shard, had(d.Name)/float64(d.Shards), ts)
			}
		}
	}
	return conn.SendBatch(ctx, &b).Close()
}

// had returns the tokens that a limit and key had in the beginning.
func had(limit string) float64 {
	switch limit {
	case tight.Name:
		return tight.Capacity
	case narrow.Name:
		return narrow.Rate
	case old.Name, past.Name:
		return old.Capacity
	case debt.Name:
		return owed
	}
	return much / 2
}

// verdict is how the accounts differ.
type verdict struct {
	lost, minted       float64 // tokens that are gone and nobody took; that are there and were taken
	missing, unwelcome int     // told OK and not there; told an error and there
	twice              int     // there more than once
	resolved           int     // unknown, and there
	rows, taken        int
	worst              string // limit and key with the largest difference
}

// audit compares the results with the database.
func (a *account) audit(ctx context.Context, p *place) (v verdict, err error) {
	there := map[int64]int{}
	rows, err := p.pool.Query(ctx, "SELECT id, name, key, tokens FROM "+p.schema+".ledger")
	if err != nil {
		return v, err
	}
	var id int64
	var m move
	if _, err = pgx.ForEachRow(rows, []any{&id, &m.Limit, &m.Key, &m.Low}, func() error {
		if m.Limit == "" {
			there[id]++
			return nil
		}
		m.High = m.Low
		a.add([]move{m})
		return nil
	}); err != nil {
		return v, err
	}
	for id, what := range a.byID {
		n := there[id]
		switch {
		case what == "ok" && n == 0:
			v.missing++
		case what != "ok" && what != "unknown" && n > 0:
			v.unwelcome++
		case what == "unknown" && n > 0:
			v.resolved++
		}
		if n > 1 {
			v.twice++
		}
	}
	return v, a.compare(ctx, p, &v)
}

// compare compares the rows with the tokens taken from them.
func (a *account) compare(ctx context.Context, p *place, v *verdict) error {
	rows, err := p.pool.Query(ctx, "SELECT name, key, sum(value) FROM "+p.schema+".rate_limits WHERE key NOT LIKE 'edited%' GROUP BY name, key")
	if err != nil {
		return err
	}
	values := map[[2]string]float64{}
	var limit, key string
	var value float64
	if _, err := pgx.ForEachRow(rows, []any{&limit, &key, &value}, func() error {
		values[[2]string{limit, key}] = value
		a.of(limit, key)
		return nil
	}); err != nil {
		return err
	}
	tolerance := 0.01 + 2*much*time.Since(a.begun).Seconds()/eon.Seconds() // the refill of the fastest limit
	for id, m := range a.moves {
		spent := 0.0
		if value, ok := values[id]; ok {
			spent = had(id[0]) - value
		}
		lost, minted := spent-m.High-tolerance, m.Low-spent-tolerance
		if d := max(lost, minted); d > max(v.lost, v.minted, 0) {
			v.worst = fmt.Sprintf("%s, key %q: %g gone, told %g to %g", id[0], id[1], spent, m.Low, m.High)
		}
		v.lost, v.minted = max(v.lost, lost), max(v.minted, minted)
		v.taken += int(math.Round(max(spent, 0)))
		v.rows++
	}
	return nil
}

// disturbed is the counts of disturbances beside the accounts.
type disturbed struct{ rounds, pruned, edits, pauses int }

// disturb prunes, edits other keys of the same limits, and pauses what is in debt, by either
// form of statements, for a while.
func (l *site) disturb(ctx context.Context, schema string, lasts time.Duration) (d disturbed, err error) {
	p, err := l.at(schema, 4)
	if err != nil {
		return d, err
	}
	defer p.close()
	for _, portable := range []bool{false, true} {
		if _, err := p.store(pgstore.Config{Portable: portable}); err != nil {
			return d, err
		}
	}
	for begun := time.Now(); err == nil && time.Since(begun) < lasts; {
		once, cancel := context.WithTimeout(ctx, time.Minute)
		err = p.disturbOnce(once, p.stores[d.rounds/2%2], &d)
		cancel()
	}
	return d, err
}

func (p *place) disturbOnce(ctx context.Context, store *pgstore.Store, d *disturbed) error {
	d.rounds++
	now := make([]string, 40)
	for i := range now {
		now[i] = oldKey(i - 20)
	}
	for _, limit := range aged {
		if _, err := p.pool.Exec(ctx, "INSERT INTO "+p.schema+".rate_limits (name, key, shard, value, ts) SELECT $1::text, k, 0, $2::float8, now() - interval '1 hour' FROM unnest($3::text[]) k ON CONFLICT DO NOTHING",
			ratelimit.NameOf(limit), had(ratelimit.NameOf(limit)), now); err != nil && outcome(err) != "again" { // it can meet a transaction that has one of them
			return fmt.Errorf("ageing rows: %w", err)
		}
	}
	n, err := store.Prune(ctx, append(slices.Clone(all), debt)...)
	if err != nil {
		return fmt.Errorf("pruning: %w", err)
	}
	d.pruned += int(n)
	owing := fmt.Sprint(d.rounds % keys)
	if _, err := store.Pause(ctx, debt, owing, 5*time.Millisecond); err != nil {
		return fmt.Errorf("pausing: %w", err)
	}
	if d.rounds%2 == 0 {
		if err := store.Resume(ctx, debt, owing); err != nil {
			return fmt.Errorf("resuming: %w", err)
		}
	}
	d.pauses++
	key := fmt.Sprintf("edited %d", d.rounds%3)
	edited := []ratelimit.Limit{tokens, sliding}[d.rounds%2]
	fewer, fewerSlides := shards, slides
	fewer.Shards, fewerSlides.Shards = 2, 2
	for what, edit := range map[string]func() error{
		"take": func() error {
			_, err := store.Allow(ctx, shards.ForN(key, 5), slides.ForN(key, 5), edited.ForN(key, 5))
			return err
		},
		"pause":        func() error { _, err := store.Pause(ctx, edited, key, time.Hour); return err },
		"fewer shards": func() error { _, err := store.Change(ctx, shards, fewer, key); return err },
		"back":         func() error { _, err := store.Change(ctx, fewer, shards, key); return err },
		"fewer slides": func() error { _, err := store.Change(ctx, slides, fewerSlides, key); return err },
		"more slides":  func() error { _, err := store.Change(ctx, fewerSlides, slides, key); return err },
		"credit":       func() error { _, err := store.Credit(ctx, edited.ForN(key, 3)); return err },
		"resume":       func() error { return store.Resume(ctx, edited, key) },
		"reset":        func() error { return store.Reset(ctx, edited, key) },
	} {
		if err := edit(); err != nil {
			return fmt.Errorf("%s: %w", what, err)
		}
		d.edits++
	}
	return nil
}

// attackAccounts has several processes call everything in every way, and then finds
// every token again.
func attackAccounts(ctx context.Context, l *site, c *chapter) error {
	const workers = 8
	var tasks []task
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		tasks = append(tasks, task{Workers: workers, Conns: 10, Isolation: level})
	}
	tasks[1].Portable = true
	tasks[0].Escrow, tasks[2].Escrow = time.Second, 100*time.Millisecond
	c.say("%d processes of %d goroutines call all verbs that take or give back. They call on their own, in transactions at every isolation level, and in the runner with functions that misbehave. There are %d limits of all three kinds, with shards and plans. The connections of each process have another default isolation level, one is Portable, and two take ahead (Config.Escrow of 100 ms and 1 s). Meanwhile others prune, pause and edit.", len(tasks), workers, len(all)+1)
	lasts := l.seconds(60, 10)
	var d disturbed
	harm := func(ctx context.Context, s *suffering) (err error) {
		d, err = l.disturb(ctx, s.schema, lasts)
		return err
	}
	a, err := l.suffer(ctx, c, attack{tasks: tasks, lasts: lasts, harm: harm, must: (*suffering).variety})
	if err != nil {
		return err
	}
	c.Zero("errors that nobody made", a.unexpected(c))
	for _, verb := range slices.Sorted(maps.Keys(a.counts)) {
		what := ""
		for _, w := range slices.Sorted(maps.Keys(a.counts[verb])) {
			what += fmt.Sprintf(", %d %s", a.counts[verb][w], w)
		}
		c.Tell("told: "+verb, "%s", strings.TrimPrefix(what, ", "))
	}
	var slides int
	if err := l.ask(ctx, "SELECT count(*) FROM "+a.schema+".rate_limits WHERE slots IS NOT NULL", &slides); err != nil {
		return err
	}
	c.happened(
		count{"rows of sliding windows that calls made or made anew", slides},
		count{"decisions from memory", a.memory},
		count{"rows pruned beside", d.pruned},
		count{"edits of other keys beside", d.edits},
		count{"pauses of what is in debt beside", d.pauses},
	)
	return nil
}

// variety returns the counts of all kinds that the work must have.
func (s *suffering) variety() []count {
	counts := []count{
		{"transactions that PostgreSQL asked to run again", s.total("transaction", "again")},
		{"transactions that were rolled back", s.total("transaction, rolled back", "rolled back")},
		{"refusals", s.total("", "refused")},
	}
	seen := map[string]bool{}
	for _, b := range behaviours {
		if !seen[b.name] {
			seen[b.name] = true
			counts = append(counts, count{"functions with " + b.name, s.ran("runner, " + b.name)})
		}
	}
	return counts
}

// ran counts the outcomes of a runner's function.
func (a *account) ran(verb string) int {
	return a.count(func(v, what string) bool { return v == verb && what != "refused" })
}

// own counts decisions on their own.
func (a *account) own() int {
	return a.count(func(verb, _ string) bool {
		return !strings.HasPrefix(verb, "transaction") && !strings.HasPrefix(verb, "runner")
	})
}

// unexpected counts errors, and says which they were.
func (a *account) unexpected(c *chapter) (n int) {
	const most = 12
	for i, text := range slices.Sorted(maps.Keys(a.faults)) {
		n += a.faults[text]
		if i < most {
			c.Tell("error", "%d × %s", a.faults[text], strings.ReplaceAll(text, "|", "/"))
		}
	}
	return n
}

// lines are the figures of a verdict. Killed clients may have had some tokens under way.
func (v *verdict) lines(c *chapter, slack float64) {
	besides := ""
	if slack > 0 {
		besides = ", but for what killed clients had under way"
	}
	c.Tell("limits and keys, tokens gone from them", "%d, %d", v.rows, v.taken)
	c.AtMost("most tokens gone from a limit that nobody took"+besides, max(v.lost, 0), slack, "")
	c.AtMost("most tokens left in a limit that were taken"+besides, max(v.minted, 0), slack, "")
	if v.worst != "" {
		c.Tell("the largest difference", "%s", v.worst)
	}
	c.Zero("told OK, and not there", v.missing)
	c.Zero("told an error, and there", v.unwelcome)
	c.Zero("there twice", v.twice)
}
