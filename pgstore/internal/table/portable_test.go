package table

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/ratelimit/internal/pgtest"
	"github.com/pgratelimit/ratelimit/pgstore/internal/conn"
)

// What a PostgreSQL that distributes tables refuses, the statements of the
// portable form must not have. Whether an expression is immutable is asked of
// PostgreSQL itself, functions, operators and casts alike: an index on an
// expression is only to be had if all of it is immutable and none of it is a
// sub-select. So the expressions are indexed, on a table whose columns stand
// for the parameters and the rows.

// allStatements returns the statements on a table, by their folders and names.
func allStatements(distributed bool) map[string]string {
	all, in := make(map[string]string), textsFor("s.rate_limits", distributed)
	for _, folder := range []string{"bucket", "window", "calendar", "slots", "common", "maintenance", "inflight"} {
		for name, text := range in(folder) {
			if strings.HasSuffix(name, "_part") {
				text = partTexts(text, map[string]string{"bucket": bucketRow, "window": windowRow}[folder])[2]
			}
			all[folder+"."+name] = text
		}
	}
	return all
}

func TestPortableSQL(t *testing.T) {
	judge := newJudge(t)
	found := 0
	for name, text := range allStatements(true) {
		found += len(expressions(text))
		if faults := judge.faults(t, text); faults != nil {
			t.Errorf("%s: %q in:\n%s", name, faults, text)
		}
	}
	if found != 111 { // none found would be none at fault
		t.Errorf("found %d expressions, want 111", found)
	}
}

// A lock_timeout has to reach the nodes: Citus sends them what SET LOCAL sets while it is told to, and
// nothing that set_config sets.
func TestPortableLockTimeout(t *testing.T) {
	var batch pgx.Batch
	New("s", true, time.Second).QueueBounds(&batch, conn.PassOver)
	var sent []string
	for _, q := range batch.QueuedQueries {
		sent = append(sent, q.SQL)
	}
	if want := []string{propagateSQL, "SET LOCAL lock_timeout = '1'", boundsSQL}; !slices.Equal(sent, want) {
		t.Errorf("sent %q, want %q", sent, want)
	}
}

// TestPortableSQLFindsFaults has the test above find what somebody could write.
func TestPortableSQLFindsFaults(t *testing.T) {
	judge := newJudge(t)
	take := allStatements(true)["window.take"]
	for _, test := range []struct{ name, old, new, want string }{
		{"clock in RETURNING", "RETURNING value, ts", "RETURNING value, clock_timestamp()", "IMMUTABLE"},
		{"now in SET", "ts = greatest(r.ts, excluded.ts)", "ts = greatest(r.ts, now())", "IMMUTABLE"},
		{"a time by keyword", "ts = greatest(r.ts, excluded.ts)", "ts = greatest(r.ts, CURRENT_TIMESTAMP)", "IMMUTABLE"},
		{"clock in WHERE", "WHERE r.value ", "WHERE r.ts < clock_timestamp() AND r.value ", "IMMUTABLE"},
		{"a stable operator", "ts = greatest(r.ts, excluded.ts)", "ts = r.ts + interval '1 day'", "IMMUTABLE"},
		{"a stable function", "tstzrange_subdiff(excluded.ts, r.ts)", "date_part('epoch', excluded.ts)", "IMMUTABLE"},
		{"a stable cast", "RETURNING value, ts", "RETURNING value, ts::text", "IMMUTABLE"},
		{"a volatile function", "SET value = ", "SET value = random() * ", "IMMUTABLE"},
		{"a sub-select in SET", "ts = greatest(r.ts, excluded.ts)", "ts = (SELECT excluded.ts)", "subquery"},
		{"a sub-select in WHERE", "WHERE r.value ", "WHERE EXISTS (SELECT) AND r.value ", "subquery"},
		{"INSERT SELECT", "VALUES (", "SELECT (", "INSERT ... SELECT"},
		{"a parameter without a cast", "- $5::float8", "- $5", "$5 has no cast"},
		{"a recursive CTE", "WITH written", "WITH RECURSIVE written", "WITH RECURSIVE"},
		{"two writing CTEs", "RETURNING value, ts, paused", "RETURNING value, ts, paused), b AS (DELETE FROM s.rate_limits", "2 writing statements"},
	} {
		mutant := strings.Replace(take, test.old, test.new, 1)
		if mutant == take {
			t.Fatalf("%s: %q is not in the statement any more", test.name, test.old)
		}
		if faults := judge.faults(t, mutant); !strings.Contains(strings.Join(faults, "\n"), test.want) {
			t.Errorf("%s: got %q, want %q", test.name, faults, test.want)
		}
	}
}

var (
	spaceRE     = regexp.MustCompile(`\s+`)
	parameterRE = regexp.MustCompile(`\$(\d+)(::(\w+))?`)
	writingRE   = regexp.MustCompile(`\b(INSERT INTO|DELETE FROM|MERGE INTO|UPDATE \S+ AS|UPDATE \S+ SET)\b`)
	clauseRE    = regexp.MustCompile(`^(DO UPDATE SET|SET|WHERE|RETURNING|VALUES|ON CONFLICT|USING|FROM|SELECT)\b`)
)

// judge is a table whose columns stand for what expressions mention.
type judge struct {
	conn  *pgx.Conn
	table string
}

func newJudge(t *testing.T) judge {
	t.Helper()
	db := pgtest.NewEmpty(t)
	conn, err := pgx.Connect(t.Context(), db.URL)
	noError(t, err)
	t.Cleanup(func() { conn.Close(context.Background()) })
	var columns []string
	for _, prefix := range []string{"", "r_", "excluded_"} {
		columns = append(columns, fmt.Sprintf("%[1]sname text, %[1]skey text, %[1]sshard int4, %[1]svalue float8, %[1]sts timestamptz, %[1]spaused timestamptz, %[1]sslots float8[], %[1]sahead float8[]", prefix))
	}
	for _, typ := range []string{"text", "int4", "int8", "float8", "timestamptz", "bool"} {
		columns = append(columns, fmt.Sprintf("p_%[1]s %[1]s", typ))
	}
	columns = append(columns, "p_floats float8[]", "p_instants timestamptz[]")
	table := db.Schema + ".judge"
	create := "CREATE TABLE " + table + " (" + strings.Join(columns, ", ") + ")"
	noError(t, errOf(conn.Exec(t.Context(), create)))
	return judge{conn, table}
}

// faults says what is wrong with a statement of the portable form.
func (j judge) faults(t *testing.T, text string) (faults []string) {
	t.Helper()
	text = spaceRE.ReplaceAllString(text, " ")
	for _, p := range parameterRE.FindAllStringSubmatch(text, -1) {
		if p[3] == "" {
			faults = append(faults, "$"+p[1]+" has no cast")
		}
	}
	if n := len(writingRE.FindAllString(text, -1)); n > 1 {
		faults = append(faults, fmt.Sprintf("%d writing statements", n))
	}
	if at := strings.Index(text, "INSERT INTO"); at >= 0 && slices.Contains(keywords(text[at:]), "SELECT") {
		faults = append(faults, "INSERT ... SELECT")
	}
	if strings.Contains(text, "WITH RECURSIVE") {
		faults = append(faults, "WITH RECURSIVE")
	}
	for _, e := range expressions(text) {
		if strings.TrimSpace(e) == "NULL" { // which has no type to be indexed by
			continue
		}
		if err := j.immutable(t.Context(), e); err != nil {
			faults = append(faults, e+": "+err.Error())
		}
	}
	return faults
}

// immutable is PostgreSQL's objection to an index on the expression.
func (j judge) immutable(ctx context.Context, expression string) error {
	expression = parameterRE.ReplaceAllString(strings.NewReplacer("float8[]", "floats", "timestamptz[]", "instants").Replace(expression), "p_$3")
	for _, row := range []string{"r", "excluded"} {
		expression = strings.ReplaceAll(expression, row+".", row+"_")
	}
	tx, err := j.conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	_, err = tx.Exec(ctx, fmt.Sprintf("CREATE INDEX ON %s ((%s))", j.table, expression))
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return errors.New(pgErr.Message)
	}
	return err
}

// expressions are those in the SET, WHERE and RETURNING of a statement that
// writes, inside of a CTE too.
func expressions(text string) (found []string) {
	text = spaceRE.ReplaceAllString(text, " ")
	at := writingRE.FindStringIndex(text)
	if at == nil {
		return nil
	}
	for _, c := range clauses(text[at[0]:]) {
		switch c.keyword {
		case "DO UPDATE SET", "SET":
			for _, assignment := range splitTop(c.body) {
				_, expression, _ := strings.Cut(assignment, "=")
				found = append(found, expression)
			}
		case "WHERE":
			found = append(found, c.body)
		case "RETURNING":
			found = append(found, splitTop(c.body)...)
		}
	}
	return found
}

type clause struct{ keyword, body string }

// clauses cuts a statement up at its keywords, to its end or to the
// parenthesis that closes the CTE it is in.
func clauses(text string) []clause {
	all := []clause{{}}
	depth := 0
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '(':
			depth++
		case ')':
			depth--
		}
		if depth < 0 {
			break
		}
		keyword := ""
		if depth == 0 && (i == 0 || text[i-1] == ' ') {
			keyword = clauseRE.FindString(text[i:])
		}
		last := &all[len(all)-1]
		if keyword == "" {
			last.body += text[i : i+1]
			continue
		}
		all = append(all, clause{keyword: keyword})
		i += len(keyword) - 1
	}
	return all
}

func keywords(text string) (all []string) {
	for _, c := range clauses(text) {
		all = append(all, c.keyword)
	}
	return all
}

// splitTop splits at the commas that are in no parentheses or brackets.
func splitTop(list string) (parts []string) {
	depth, start := 0, 0
	for i, c := range list {
		switch c {
		case '(', '[':
			depth++
		case ')', ']':
			depth--
		case ',':
			if depth == 0 {
				parts = append(parts, strings.TrimSpace(list[start:i]))
				start = i + 1
			}
		}
	}
	return append(parts, strings.TrimSpace(list[start:]))
}
