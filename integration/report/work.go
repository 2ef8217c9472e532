package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit"
	"github.com/pgratelimit/ratelimit/internal/lab"
	"github.com/pgratelimit/ratelimit/pgstore"
)

// The limits of the accounts. So little comes in that every token can be found again.
const (
	eon  = 90 * 365 * 24 * time.Hour
	much = 1e6 // tokens in an eon are 0.02 in a minute
)

var (
	tokens  = ratelimit.TokenBucket{Name: "bucket", Rate: much, Period: eon, Capacity: much}
	window  = ratelimit.FixedWindow{Name: "window", Rate: much, Period: eon, Start: time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)}
	shards  = ratelimit.TokenBucket{Name: "shards", Rate: much, Period: eon, Capacity: much, Shards: 4}
	windows = ratelimit.FixedWindow{Name: "windows", Rate: much, Period: eon, Start: window.Start, Shards: 3}
	basic   = ratelimit.TokenBucket{Name: "plan", Rate: much, Period: eon, Capacity: much}
	premium = ratelimit.TokenBucket{Name: "plan", Rate: 2 * much, Period: eon, Capacity: 2 * much}
	tight   = ratelimit.TokenBucket{Name: "tight", Rate: 60, Period: eon, Capacity: 60}
	old     = ratelimit.TokenBucket{Name: "old", Rate: 50, Period: eon, Capacity: 50}
	debt    = ratelimit.TokenBucket{Name: "debt", Rate: much, Period: eon, Capacity: 10, MaxReserved: much}
	sliding = ratelimit.SlidingWindow{Name: "sliding window", Rate: much, Period: eon}
	slides  = ratelimit.SlidingWindow{Name: "sliding windows", Rate: much, Period: eon, Slots: 5, Shards: 3}
	narrow  = ratelimit.SlidingWindow{Name: "narrow window", Rate: 60, Period: eon, MaxReserved: ratelimit.None} // what is ahead is no count

	past = ratelimit.SlidingWindow{Name: "old window", Rate: 50, Period: eon, MaxReserved: ratelimit.None}

	remembered = []ratelimit.Limit{tokens, window, sliding}

	aged   = []ratelimit.Limit{old, past}                                                     // whose keys come and go
	seeded = []ratelimit.Limit{tokens, window, shards, windows, basic, debt, sliding, slides} // rows that are there from the start
	all    = []ratelimit.Limit{tokens, window, shards, windows, sliding, slides, basic, premium, tight, narrow, old, past}
)

const keys = 6

// move is what a call did to a limit and key: it took at least low and at most high
// tokens, which differ only if the call failed.
type move struct {
	Limit string  `json:"l"`
	Key   string  `json:"k"`
	Low   float64 `json:"a"`
	High  float64 `json:"b"`
}

// told is what a caller was told.
type told struct {
	ID    int64  `json:"i,omitempty"` // of a transaction, which writes it into the ledger
	Verb  string `json:"v"`
	What  string `json:"t"`           // ok, refused, again, error, unknown
	Moves []move `json:"m,omitempty"` // of a decision on its own
	Err   string `json:"e,omitempty"`

	Unlike string `json:"u,omitempty"` // how Config.Observe was told something else
	Memory bool   `json:"h,omitempty"` // it was told of a decision from memory
}

// work calls all verbs, in all forms.
func work(ctx context.Context, e *env) error {
	workers := make([]worker, e.Workers)
	err := e.workers(ctx, func(n int, r *rand.Rand) {
		w := &workers[n]
		if w.id == 0 {
			*w = worker{env: e, rand: r, id: int64(e.Process)*1e12 + int64(n)*1e8}
		}
		w.turn()
	})
	if e.Escrow > 0 { // or to close is to wait for a silent network, for nothing
		e.store.Close()
	}
	return err
}

// worker is one goroutine that calls. Its calls have contexts of their own, so that
// the end of the attack cancels none.
type worker struct {
	*env
	rand   *rand.Rand
	id     int64
	unlike string // what its last calls were told, and what was heard of them
	memory bool   // one of these was decided from memory
}

// tell writes what became of calls.
func (w *worker) tell(t told) {
	t.Unlike, w.unlike = w.unlike, ""
	t.Memory, w.memory = w.memory, false
	w.out.Write(t)
}

const patience = 20 * time.Second // of a call

func (w *worker) turn() {
	ctx, cancel := context.WithTimeout(context.Background(), cmp.Or(w.Patience, patience))
	defer cancel()
	switch w.rand.IntN(8) {
	case 0, 1, 2:
		w.own(ctx)
	case 3, 4, 5:
		w.transaction(ctx)
	default:
		w.runner(ctx)
	}
}

func (w *worker) next() int64 { w.id++; return w.id }

// request asks one of the limits for one to three tokens.
func (w *worker) request() ratelimit.Request {
	limit, count := all[w.rand.IntN(len(all))], float64(1+w.rand.IntN(3))
	if w.Escrow > 0 && (w.rand.IntN(2) == 0 || limit == premium) { // for memory to be used, and not lost to another plan
		return remembered[w.rand.IntN(len(remembered))].ForN("0", count)
	}
	return ratelimit.Request{Limit: limit, Key: w.key(limit), Count: count}
}

func (w *worker) key(limit ratelimit.Limit) string {
	if slices.Contains(aged, limit) {
		return oldKey(w.rand.IntN(40) - 20)
	}
	return fmt.Sprint(w.rand.IntN(keys))
}

// oldKey returns a key that is in use now, some places further on: a hundred a second come
// and go. Each has a row that was full for an hour, or none.
func oldKey(further int) string { return fmt.Sprint(time.Now().UnixMilli()/10 + int64(further)) }

func (w *worker) requests() []ratelimit.Request {
	requests := make([]ratelimit.Request, 1+w.rand.IntN(3))
	for i := range requests {
		requests[i] = w.request()
	}
	return distinct(requests)
}

// distinct leaves out requests for a limit and key that another is for: two plans of
// one key in a call are an error.
func distinct(requests []ratelimit.Request) (left []ratelimit.Request) {
	seen := map[[2]string]bool{}
	for _, r := range requests {
		id := [2]string{ratelimit.NameOf(r.Limit), r.Key}
		if !seen[id] {
			left = append(left, r)
		}
		seen[id] = true
	}
	return left
}

func (w *worker) owing() ratelimit.Request {
	return debt.ForN(fmt.Sprint(w.rand.IntN(keys)), float64(1+w.rand.IntN(3)))
}

// took returns what a result says was taken.
func took(result ratelimit.Result) (moves []move) {
	if !result.OK {
		return nil
	}
	for _, s := range result.Each() {
		moves = append(moves, move{ratelimit.NameOf(s.Request.Limit), s.Request.Key, s.Taken, s.Taken})
	}
	return moves
}

// perhaps returns what a call for requests may have taken.
func perhaps(requests []ratelimit.Request) (moves []move) {
	for _, r := range requests {
		moves = append(moves, move{ratelimit.NameOf(r.Limit), r.Key, 0, r.Count})
	}
	return moves
}

// takes are the verbs that take, and what they ask for.
var takes = []struct {
	name     string
	verb     func(*pgstore.Store) verb
	requests func(w *worker) []ratelimit.Request
}{
	{"Allow", allow, func(w *worker) []ratelimit.Request { return []ratelimit.Request{w.request()} }},
	{"Allow several", allow, (*worker).requests},
	{"Reserve", reserve, func(w *worker) []ratelimit.Request {
		return distinct([]ratelimit.Request{w.owing(), w.request()})[:1+w.rand.IntN(2)]
	}},
	{"AllowAtMost", atMost, func(w *worker) []ratelimit.Request { return []ratelimit.Request{w.request()} }},
	{"AllowFirst", first, func(w *worker) []ratelimit.Request {
		return distinct([]ratelimit.Request{tight.For(fmt.Sprint(w.rand.IntN(keys))), w.request()})
	}},
	{"Take", take, func(w *worker) []ratelimit.Request { return []ratelimit.Request{w.request()} }},
	{"Wait", wait, func(w *worker) []ratelimit.Request {
		return []ratelimit.Request{tokens.ForN(fmt.Sprint(w.rand.IntN(keys)), 2)}
	}},
}

// own takes on its own, and often gives back.
func (w *worker) own(ctx context.Context) {
	verb := takes[w.rand.IntN(len(takes))]
	requests := verb.requests(w)
	result, err := w.hear(ctx, ratelimit.FormOwn, func(ctx context.Context) (ratelimit.Result, error) {
		return verb.verb(w.store).own(ctx, requests...)
	})
	t := told{Verb: verb.name, What: "refused", Moves: took(result)}
	switch {
	case err != nil:
		t.What, t.Err, t.Moves = "error", err.Error(), perhaps(requests)
	case result.OK:
		t.What = "ok"
	}
	w.tell(t)
	if err == nil && result.OK {
		if verb, moves, err := w.back(ctx, nil, result); verb != "" {
			w.tellOwn(verb, err, moves, between(moves))
		}
	}
	if w.rand.IntN(4) == 0 {
		w.look(ctx)
	}
}

// look calls what changes nothing.
func (w *worker) look(ctx context.Context) {
	_, err := w.hear(ctx, ratelimit.FormOwn, func(ctx context.Context) (ratelimit.Result, error) { return w.store.Check(ctx, w.requests()...) })
	w.tellOwn("Check", err, nil, nil)
	_, err = w.store.CheckEach(ctx, w.requests()...)
	w.tellOwn("CheckEach", err, nil, nil)
}

// tellOwn writes what became of a call that gives back: moves if it succeeded, unknown
// if not.
func (w *worker) tellOwn(verb string, err error, moves, unknown []move) {
	t := told{Verb: verb, What: "ok", Moves: moves}
	if err != nil {
		t.What, t.Err, t.Moves = "error", err.Error(), unknown
	}
	w.tell(t)
}

// back gives some of what was taken back by one of the verbs, or by none; in tx unless that is nil.
func (w *worker) back(ctx context.Context, tx pgx.Tx, result ratelimit.Result) (verb string, moves []move, err error) {
	choice, form := w.rand.IntN(4), ratelimit.FormOwn
	if tx != nil {
		form = ratelimit.FormTx
	}
	switch {
	case choice < 2 && result.Receipt == nil:
	case choice == 0:
		back, err := w.hear(ctx, form, func(ctx context.Context) (back ratelimit.Result, err error) {
			if tx != nil {
				back.OK, err = w.store.CancelTx(ctx, tx, result.Receipt)
			} else {
				back.OK, err = w.store.Cancel(ctx, result.Receipt)
			}
			return back, err
		})
		if err == nil && !back.OK {
			err = errors.New("nothing was cancelled")
		}
		return "Cancel", backTo(result, func(float64) float64 { return 0 }), err
	case choice == 1:
		var used []float64
		moves := backTo(result, func(taken float64) float64 {
			used = append(used, float64(w.rand.IntN(int(taken)+2)))
			return used[len(used)-1]
		})
		_, err := w.hear(ctx, form, func(ctx context.Context) (back ratelimit.Result, err error) {
			if tx != nil {
				_, err = w.store.SettleTx(ctx, tx, result.Receipt, used...)
			} else {
				_, err = w.store.Settle(ctx, result.Receipt, used...)
			}
			back.OK = true
			return back, err
		})
		return "Settle", moves, err
	case choice == 2:
		each := result.Each()
		taken := each[w.rand.IntN(len(each))].Request
		taken.Count = 1
		_, err := w.hear(ctx, form, func(ctx context.Context) (back ratelimit.Result, err error) {
			if tx != nil {
				_, err = w.store.CreditTx(ctx, tx, taken)
			} else {
				_, err = w.store.Credit(ctx, taken)
			}
			back.OK = true
			return back, err
		})
		return "Credit", []move{{ratelimit.NameOf(taken.Limit), taken.Key, -1, -1}}, err
	}
	return "", nil, nil
}

// backTo returns what replacing what was taken by what was used moves.
func backTo(result ratelimit.Result, used func(taken float64) float64) (moves []move) {
	for _, s := range result.Each() {
		n := used(s.Taken) - s.Taken
		moves = append(moves, move{ratelimit.NameOf(s.Request.Limit), s.Request.Key, n, n})
	}
	return moves
}

// between is moves of which it is not known if they happened.
func between(moves []move) (unknown []move) {
	for _, m := range moves {
		unknown = append(unknown, move{m.Limit, m.Key, min(m.Low, 0), max(m.High, 0)})
	}
	return unknown
}

// enter writes into the ledger what a transaction did: one row that says that it was
// there, and one for each move.
func (w *worker) enter(ctx context.Context, tx pgx.Tx, id int64, moves []move) error {
	var b pgx.Batch
	b.Queue("INSERT INTO "+w.Schema+".ledger VALUES ($1::int8, '', '', 0)", id)
	for _, m := range moves {
		b.Queue("INSERT INTO "+w.Schema+".ledger VALUES ($1::int8, $2::text, $3::text, $4::float8)", id, m.Limit, m.Key, m.Low)
	}
	return tx.SendBatch(ctx, &b).Close()
}

var levels = []pgx.TxIsoLevel{"", pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

// transaction does some steps in a transaction of the caller's, and commits or not.
func (w *worker) transaction(ctx context.Context) {
	level := levels[w.rand.IntN(len(levels))]
	t := told{ID: w.next(), Verb: "transaction, " + string(level)}
	if level == "" {
		t.Verb += "role's default " + w.Isolation
	}
	tx, err := w.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	if err != nil {
		t.What, t.Err = "error", err.Error()
		w.tell(t)
		return
	}
	moves, err := w.steps(ctx, tx, 1+w.rand.IntN(2))
	if err == nil {
		err = w.enter(ctx, tx, t.ID, moves)
	}
	switch {
	case err != nil:
	case w.rand.IntN(5) == 0:
		t.Verb = "transaction, rolled back"
		err = errRolledBack
	default:
		err = tx.Commit(ctx)
		t.What = outcome(err)
	}
	if err != nil && t.What == "" {
		t.What = outcome(err)
		if t.What == "unknown" { // COMMIT was never sent
			t.What = "error"
		}
		rollBack(tx)
	}
	if err != nil {
		t.Err = err.Error()
	}
	w.tell(t)
}

// rollBack gives up soon: the network may have gone silent.
func rollBack(tx pgx.Tx) {
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	_ = tx.Rollback(ctx) // if it fails, the connection is closed
}

var errRolledBack = errors.New("as it should be")

// outcome returns what the error of a COMMIT says.
func outcome(err error) string {
	var fault *pgconn.PgError
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, errRolledBack):
		return "rolled back"
	case lab.AskedToRetry(err):
		return "again"
	case errors.Is(err, pgx.ErrTxCommitRollback), errors.As(err, &fault) && fault.Severity == "ERROR":
		return "error"
	}
	return "unknown"
}

// steps takes, gives back, and goes into nested transactions.
func (w *worker) steps(ctx context.Context, tx pgx.Tx, n int) (moves []move, err error) {
	for range n {
		if w.rand.IntN(4) == 0 {
			nested, err := w.nested(ctx, tx)
			if err != nil {
				return nil, err
			}
			moves = append(moves, nested...)
			continue
		}
		verb := takes[w.rand.IntN(len(takes))]
		result, err := w.hear(ctx, ratelimit.FormTx, func(ctx context.Context) (ratelimit.Result, error) {
			return verb.verb(w.store).inTx(ctx, tx, verb.requests(w)...)
		})
		if err != nil {
			return nil, err
		}
		moves = append(moves, took(result)...)
		if !result.OK {
			continue
		}
		_, back, err := w.back(ctx, tx, result)
		if err != nil {
			return nil, err
		}
		moves = append(moves, back...)
	}
	return moves, nil
}

func (w *worker) nested(ctx context.Context, tx pgx.Tx) ([]move, error) {
	inner, err := tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	moves, err := w.steps(ctx, inner, 1)
	if err != nil {
		return nil, err
	}
	if w.rand.IntN(2) == 0 {
		return nil, inner.Rollback(ctx)
	}
	return moves, inner.Commit(ctx)
}

// behaviours are what functions do that the runner runs, when they have taken and have
// written so into the ledger.
var behaviours = []struct {
	name string
	do   func(ctx context.Context, w *worker, tx pgx.Tx) error

	commits bool // itself, so that its error does not say what became of that
}{
	{"well", func(context.Context, *worker, pgx.Tx) error { return nil }, false},
	{"well", func(context.Context, *worker, pgx.Tx) error { return nil }, false},
	{"well", func(context.Context, *worker, pgx.Tx) error { return nil }, false},
	{"an error", func(context.Context, *worker, pgx.Tx) error { return errRolledBack }, false},
	{"a panic", func(context.Context, *worker, pgx.Tx) error { panic(errRolledBack) }, false},
	{"the end of its goroutine", func(context.Context, *worker, pgx.Tx) error { runtime.Goexit(); return nil }, false},
	{"its own Rollback", func(ctx context.Context, _ *worker, tx pgx.Tx) error { return tx.Rollback(ctx) }, false},
	{"its own ROLLBACK", func(ctx context.Context, _ *worker, tx pgx.Tx) error { return send(ctx, tx, "ROLLBACK") }, false},
	{"its own Commit", func(ctx context.Context, _ *worker, tx pgx.Tx) error { return tx.Commit(ctx) }, true},
	{"its own COMMIT", func(ctx context.Context, _ *worker, tx pgx.Tx) error { return send(ctx, tx, "COMMIT") }, true},
	{"a swallowed error", func(ctx context.Context, _ *worker, tx pgx.Tx) error {
		_ = send(ctx, tx, "SELECT 1/0")
		return nil
	}, false},
	{"rows that stay open", func(ctx context.Context, _ *worker, tx pgx.Tx) error {
		_, err := tx.Query(ctx, "SELECT generate_series(1, 3)")
		return err
	}, false},
	{"a nested transaction that is rolled back", func(ctx context.Context, w *worker, tx pgx.Tx) error {
		inner, err := tx.Begin(ctx)
		if err != nil {
			return err
		}
		if _, err := w.steps(ctx, inner, 1); err != nil {
			return err
		}
		return inner.Rollback(ctx)
	}, false},
	{"a nap of 30 ms", func(context.Context, *worker, pgx.Tx) error { time.Sleep(30 * time.Millisecond); return nil }, false},
	{"SET LOCAL", func(ctx context.Context, _ *worker, tx pgx.Tx) error {
		return send(ctx, tx, "SET LOCAL search_path = pg_catalog; SET LOCAL statement_timeout = '3s'; SET LOCAL lock_timeout = '1s'")
	}, false},
}

func send(ctx context.Context, tx pgx.Tx, sql string) error {
	_, err := tx.Conn().Exec(ctx, sql)
	return err
}

// runner has a function run that behaves well or not.
func (w *worker) runner(ctx context.Context) {
	behaviour := behaviours[w.rand.IntN(len(behaviours))]
	t := told{ID: w.next(), Verb: "runner, " + behaviour.name}
	run, requests := w.store.AllowFunc, w.requests()
	if w.rand.IntN(3) == 0 {
		run, requests = w.store.ReserveFunc, []ratelimit.Request{w.owing()}
	}
	_, err := w.hear(ctx, ratelimit.FormRunner, func(ctx context.Context) (result ratelimit.Result, err error) {
		err = alone(func() (err error) {
			result, err = run(ctx, requests, func(tx pgx.Tx, result ratelimit.Result) error {
				if err := w.enter(ctx, tx, t.ID, took(result)); err != nil {
					return err
				}
				return behaviour.do(ctx, w, tx)
			})
			return err
		})
		return result, err
	})
	switch {
	case err == nil:
		t.What = "ok"
	case errors.Is(err, ratelimit.ErrRefused):
		t.What = "refused"
	case errors.Is(err, pgstore.ErrOutcomeUnknown) && w.Escrow > 0 && behaviour.name != "well":
		t.What, t.Moves = "unknown", perhaps(requests) // as promised: what is from memory is spent
	case errors.Is(err, pgstore.ErrOutcomeUnknown), behaviour.commits:
		t.What, t.Err = "unknown", err.Error()
	case behaviour.name == "well" || behaviour.name == "SET LOCAL":
		t.What, t.Err = "error", err.Error()
	default:
		t.What, t.Err = "rolled back", err.Error()
	}
	w.tell(t)
}

// alone runs do in a goroutine of its own, which do may end. That, and a panic, is an
// error.
func alone(do func() error) error {
	result := make(chan error, 1)
	go func() {
		err := errors.New("the goroutine ended")
		defer func() {
			if p := recover(); p != nil {
				err = fmt.Errorf("panic: %v", p)
			}
			result <- err
		}()
		err = do()
	}()
	return <-result
}
