package catalog

import (
	"context"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
)

type whoKey struct{}

// WithWho returns a context for Set, Publish and the other edits of a [Catalog], by which the history
// has who makes the change, beside PostgreSQL's role: such as the person who is signed in. It is what
// the program says, and believed. An edit is [ratelimit.ErrInvalid] if who is longer than 255
// bytes, or not valid UTF-8. In a transaction of the caller's it holds until that ends.
//
// In SQL, SET LOCAL ratelimit.who = 'ann' does the same.
func WithWho(ctx context.Context, who string) context.Context {
	return context.WithValue(ctx, whoKey{}, who)
}

// writer is inTx for edits, by whom the context says.
func (c *Catalog) writer(ctx context.Context, tx pgx.Tx) (editor, error) {
	to, err := c.inTx(tx)
	if err != nil {
		return nil, err
	}
	who, _ := ctx.Value(whoKey{}).(string)
	switch {
	case who == "":
		return to, nil
	case len(who) > mostWho || !utf8.ValidString(who) || strings.ContainsRune(who, 0):
		return nil, invalid("Who", strings.ToValidUTF8(who[:min(len(who), mostWho)], "?"), "must have at most 255 bytes, of UTF-8 without zero bytes")
	}
	return to, to.as(ctx, who)
}

// mostWho is how many bytes a name has at most: about as many as one of a limit.
const mostWho = 255

// editor is the catalog as a transaction sees it.
type editor interface {
	// as has the history say who makes the changes from now on, in this transaction.
	as(ctx context.Context, who string) error

	// lock waits until no other edit is under way. Until unlock, or the end of the
	// transaction, none begins.
	lock(ctx context.Context) (unlock func(), err error)
	rowsOf(ctx context.Context, names []string, key string) (*reading, error)
	publish(ctx context.Context, p *published) error
	set(ctx context.Context, e *Entry) error
	unset(ctx context.Context, at place) error
	forget(ctx context.Context, name string) (int64, error)
}

type tableEditor struct {
	*table
	tx pgx.Tx
}

func (t tableEditor) as(ctx context.Context, who string) error {
	_, err := t.tx.Exec(ctx, "SELECT set_config('ratelimit.who', $1::text, true)", who)
	return fault("say who makes a change", err)
}

func (t tableEditor) lock(ctx context.Context) (func(), error) {
	return func() {}, t.table.lock(ctx, t.tx)
}

func (t tableEditor) rowsOf(ctx context.Context, names []string, key string) (*reading, error) {
	return t.table.rowsOf(ctx, t.tx, names, key)
}

func (t tableEditor) publish(ctx context.Context, p *published) error {
	return t.table.publish(ctx, t.tx, p)
}

func (t tableEditor) set(ctx context.Context, e *Entry) error { return t.table.set(ctx, t.tx, e) }

func (t tableEditor) unset(ctx context.Context, at place) error {
	return t.table.unset(ctx, t.tx, at.name, at.key)
}

func (t tableEditor) forget(ctx context.Context, name string) (int64, error) {
	return t.table.forget(ctx, t.tx, name)
}

type memoryEditor struct {
	*memory
	who string
}

func (m *memoryEditor) as(_ context.Context, who string) error {
	m.who = who
	return nil
}

func (m *memoryEditor) lock(context.Context) (func(), error) {
	m.editing.Lock()
	return m.editing.Unlock, nil
}

func (m *memoryEditor) rowsOf(_ context.Context, names []string, key string) (*reading, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.memory.rowsOf(names, key), nil
}

func (m *memoryEditor) publish(_ context.Context, p *published) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.memory.publish(p, m.who)
	return nil
}

func (m *memoryEditor) set(_ context.Context, e *Entry) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.memory.set(*e, m.who)
	return nil
}

func (m *memoryEditor) unset(_ context.Context, at place) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.memory.unset(at, m.who)
	return nil
}

func (m *memoryEditor) forget(_ context.Context, name string) (int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.memory.forget(name, m.who), nil
}
